"""The progress bar, at no cost between its refreshes."""

from time import monotonic
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's, which is drawn `refresh_rate` times a second, but gathers at every step what it is to show."""

    _drawn = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = monotonic()
        if (now - self._drawn >= 1 / self.refresh_rate or trainer.is_last_batch) and not self.is_disabled:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self._drawn = now
