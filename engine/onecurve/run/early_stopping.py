"""Stop a run early that does not improve."""

import logging
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping

_log = logging.getLogger(__name__)


class ResumableEarlyStopping(EarlyStopping):
    """Lightning's EarlyStopping, which counts each validation once, and says in the end why it has stopped the run."""

    def __init__(self, check_on_train_epoch_end: bool | None = False, **options: Any) -> None:
        super().__init__(check_on_train_epoch_end=check_on_train_epoch_end, **options)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.stopping_reason_message and trainer.is_global_zero:
            _log.info("stopped early: %s", self.stopping_reason_message)
