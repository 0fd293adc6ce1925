"""Early stopping that a restart does not undo."""

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping


class LastingEarlyStopping(EarlyStopping):
    """Lightning's own; but a run that it has stopped stays so when it is started again."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience
