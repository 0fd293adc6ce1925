"""A progress bar without cost between its refreshes."""

from time import monotonic
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar


class ProgressBar(RichProgressBar):
    """Lightning's RichProgressBar, with its metrics gathered at each of the `refresh_rate` refreshes per second.

    Lightning gathers them at every step.
    """

    _refreshed_at = 0.0

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = monotonic()
        if (now - self._refreshed_at >= 1 / self.refresh_rate or trainer.is_last_batch) and not self.is_disabled:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            self._refreshed_at = now
