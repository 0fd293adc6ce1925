"""Check before training that the metric of a callback can exist."""

import logging
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from src.utils.errors import UserError

_log = logging.getLogger(__name__)


class MonitorCheck(L.Callback):
    """Finds the callbacks that monitor a validation metric in a run without validation.

    Args:
        callbacks: the configured callbacks, by the names of their options.
    """

    def __init__(self, callbacks: dict[str, Any]) -> None:
        self.callbacks = callbacks

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warn of a checkpoint callback, which saves nothing.

        Raises:
            UserError: if another callback waits for validation.
        """
        if sum(trainer.num_val_batches):
            return
        for name, callback in self.callbacks.items():
            monitor = getattr(callback, "monitor", None) or ""
            if monitor.startswith("val/"):
                problem = f"{name} monitors {monitor}, but the run has no validation"
                remedy = f"set data.val_fraction and trainer.limit_val_batches above 0, or {name}=null"
                if not isinstance(callback, Checkpoint):
                    raise UserError(f"{problem}: {remedy}")
                _log.warning("%s, so it saves nothing: %s", problem, remedy)
