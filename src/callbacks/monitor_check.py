"""Check before training that the metric of a callback can exist."""

import logging
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from src.utils.errors import UserError

_log = logging.getLogger(__name__)


class MonitorCheck(L.Callback):
    """Finds the callbacks that monitor a metric which validation does not log, or in a run without validation.

    Args:
        callbacks: the configured callbacks, by the names of their options.
    """

    def __init__(self, callbacks: dict[str, Any]) -> None:
        self.callbacks = callbacks

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the metrics of a module that was not written for this template; others have no sanity check.

        A module may log nothing in the sanity check, and Lightning checks other metrics when they are due.

        Raises:
            UserError: if validation did not log a metric.
        """
        logged = trainer.callback_metrics
        for name, callback in self.callbacks.items():
            monitor = getattr(callback, "monitor", None) or ""
            if logged and monitor.startswith("val") and monitor not in logged:
                raise UserError(
                    f"{name} monitors {monitor}, which validation does not log (it logs {', '.join(logged)}): "
                    f"set {name}.monitor and {name}.mode, or {name}=null"
                )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Warn of a checkpoint callback, which saves nothing.

        Raises:
            UserError: if another callback waits for validation.
        """
        data: Any = trainer.datamodule
        if data.evaluated_samples("val"):
            return
        for name, callback in self.callbacks.items():
            monitor = getattr(callback, "monitor", None) or ""
            if monitor.startswith("val/"):
                problem = f"{name} monitors {monitor}, but the run has no validation"
                remedy = f"set data.val_fraction and trainer.limit_val_batches above 0, or {name}=null"
                if not isinstance(callback, Checkpoint):
                    raise UserError(f"{problem}: {remedy}")
                _log.warning("%s, so it saves nothing: %s", problem, remedy)
