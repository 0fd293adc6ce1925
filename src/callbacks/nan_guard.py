"""Stop a run that has diverged, before it wastes time or writes a useless checkpoint."""

import math
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from src.utils.errors import UserError
from src.utils.log_points import is_log_point
from src.utils.tensors import to_local


class NaNGuard(L.Callback):
    """Checks the training loss at every log point, and all weights before a checkpoint is saved.

    The loss is the same on every rank, so that all ranks stop together. If ranks hold different weights, one rank may
    stop alone; the launcher then ends the others.

    Raises:
        UserError: if a value is not finite; the message names the last good checkpoint.
    """

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if is_log_point(trainer, trainer.global_step):
            loss = float(trainer.callback_metrics.get("train/loss", 0.0))
            if not math.isfinite(loss):
                self._stop(trainer, f"train/loss is {loss}")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for name, tensor in checkpoint["state_dict"].items():
            local = to_local(tensor)
            if local.is_floating_point() and not torch.isfinite(local).all():
                self._stop(trainer, f"{name} is not finite")

    def _stop(self, trainer: L.Trainer, problem: str) -> NoReturn:
        callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        files = [Path(callback.best_model_path) for callback in callbacks]
        written = [file for file in files if file.is_file()]  # ModelCheckpoint sets the path before it writes the file
        last_good = max(written, key=lambda file: file.stat().st_mtime) if written else "none yet"
        raise UserError(
            f"{problem} at step {trainer.global_step}: training diverged; lower optimizer.lr or lengthen "
            f"scheduler.warmup; last good checkpoint: {last_good}"
        )
