"""Checks of every run: monitored metrics exist, steps train, and the loss and the weights are finite."""

import logging
import math
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from src.engine.utils.errors import UserError
from src.engine.utils.steps import is_log_point
from src.engine.utils.tensors import to_local

_log = logging.getLogger(__name__)
_USUAL = {"val/loss", "val/acc"}  # metrics of the template's modules


class RunChecks(L.Callback):
    """Refuses a run in which a monitored metric cannot exist, and stops one that has diverged.

    The training loss is checked at every log point, where it is the same on every rank, so that all ranks stop
    together. All weights are checked before a checkpoint is saved. If ranks hold different weights, one rank may stop
    alone; the launcher then ends the others.

    Args:
        callbacks: the configured callbacks, by the names of their options.
    """

    def __init__(self, callbacks: dict[str, Any]) -> None:
        self.callbacks = callbacks
        self._has_trained: bool | None = None  # in this start; None before the first batch

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let a sanity check show whether an unusual metric exists, which otherwise takes an epoch."""
        if {*self._monitors(trainer).values()} - _USUAL:
            trainer.num_sanity_val_steps = trainer.num_sanity_val_steps or 1

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the metrics if the module is not of this template, or one is unusual; other runs have no such check.

        A module may log nothing in the sanity check, and Lightning checks other metrics when they are due.
        """
        logged = trainer.callback_metrics
        for name, monitor in self._monitors(trainer).items():
            if logged and monitor not in logged:
                raise UserError(
                    f"{name} monitors {monitor}, which validation does not log (it logs {', '.join(logged)}): "
                    f"set its `monitor` to one of these, or {_without(name)}"
                )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a monitor in a run without validation; a checkpoint callback only saves nothing."""
        data: Any = trainer.datamodule
        has_step = is_overridden("validation_step", pl_module)
        if data.evaluated_samples("val") and has_step:
            return
        cause, change = "", "give it validation samples (data.val_fraction, for images)"
        if data.limits["val"] == 0:
            cause, change = " (trainer.limit_val_batches=0)", "set trainer.limit_val_batches=1.0"
        elif not has_step:
            cause, change = f": {type(pl_module).__name__} has no validation_step", "add it"
        elif not is_overridden("val_dataloader", data.plain, L.LightningDataModule):
            cause, change = f": {type(data.plain).__name__} has no val_dataloader", "add it"
        for name, monitor in self._monitors(trainer).items():
            problem = f"{name} monitors {monitor}, but the run has no validation{cause}"
            remedy = f"{change}, or {_without(name)}"
            if not isinstance(self.callbacks.get(name), Checkpoint):
                raise UserError(f"{problem}: {remedy}")
            _log.warning("%s, so it saves nothing: %s", problem, remedy)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if loss.numel() != 1:
            raise UserError(
                f"{type(pl_module).__name__}.training_step has a loss of shape {list(loss.shape)}: "
                "reduce it to one number, such as by loss.mean()"
            )

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        steps = bool(outputs) if pl_module.automatic_optimization else trainer.global_step > 0
        self._has_trained = self._has_trained or steps
        if is_log_point(trainer, trainer.global_step):
            loss = float(trainer.callback_metrics.get("train/loss", 0.0))
            if not math.isfinite(loss):
                _stop(trainer, f"train/loss is {loss}")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let all ranks compute the metrics of the epoch, which communicate, before rank zero's progress bar does."""
        _ = trainer.callback_metrics
        if self._has_trained is False and not trainer.fast_dev_run:
            problem, remedy = "steps no optimizer", "call step() of those that self.optimizers() returns"
            if pl_module.automatic_optimization:
                problem, remedy = "returns None at each step of an epoch", "return the loss"
            raise UserError(f"{type(pl_module).__name__}.training_step {problem}, so nothing is trained: {remedy}")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        _ = trainer.callback_metrics

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for name, tensor in checkpoint["state_dict"].items():
            local = to_local(tensor)
            if local.is_floating_point() and not torch.isfinite(local).all():
                _stop(trainer, f"{name} is not finite")

    def _monitors(self, trainer: L.Trainer) -> dict[str, str]:
        """Return the validation metric of each callback and scheduler that monitors one, by its option."""
        monitors = {name: getattr(callback, "monitor", None) for name, callback in self.callbacks.items()}
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:
                monitors["scheduler"] = config.monitor
        return {name: monitor for name, monitor in monitors.items() if monitor and monitor.startswith("val")}


def _without(name: str) -> str:
    """Return how to leave a callback or the scheduler out."""
    return "choose another scheduler" if name == "scheduler" else f"{name}=null"


def _stop(trainer: L.Trainer, problem: str) -> NoReturn:
    """Raise the error of a diverged run, with the newest checkpoint that is on disk."""
    callbacks: list[Any] = trainer.checkpoint_callbacks
    files = [Path(callback.best_model_path) for callback in callbacks if hasattr(callback, "best_model_path")]
    written = [file for file in files if file.is_file()]  # Lightning sets the path before it writes the file
    last_good = max(written, key=lambda file: file.stat().st_mtime) if written else "none yet"
    raise UserError(
        f"{problem} at step {trainer.global_step}: training diverged; lower optimizer.lr or lengthen "
        f"scheduler.warmup; last good checkpoint: {last_good}"
    )
