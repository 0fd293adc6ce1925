"""Early stopping that a restart does not undo."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping


class ResumableEarlyStopping(EarlyStopping):
    """Lightning's EarlyStopping with a permanent decision: a stopped run stays stopped when it is started again.

    Each validation counts once. The patience comes from the configuration, not from the checkpoint. If it has changed,
    a stopped run continues, and the next validation decides.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(check_on_train_epoch_end=False, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"patience": self.patience})
        if state_dict["patience"] != self.patience:
            self.stopping_reason_message = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop a run that a validation has already stopped, even if `min_epochs` postponed the end."""
        trainer.should_stop = trainer.should_stop or self.stopping_reason_message is not None
