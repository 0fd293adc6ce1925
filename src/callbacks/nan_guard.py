"""Stop a run that has diverged, before it spends more time or writes a checkpoint that is no use."""

import math
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor

from src.utils.errors import UserError


class NaNGuard(L.Callback):
    """Looks at the training loss where it is logged, and at every weight before it is saved.

    The loss is the same on every rank, so that all stop together; where a rank has other weights than the rest, it
    alone may stop, and the launcher ends the others.

    Raises:
        UserError: if one is not finite; the message names the last good checkpoint.
    """

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:
            loss = float(trainer.callback_metrics.get("train/loss", 0.0))
            if not math.isfinite(loss):
                self._stop(trainer, f"train/loss is {loss}")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for name, tensor in checkpoint["state_dict"].items():
            held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if held.is_floating_point() and not torch.isfinite(held).all():
                self._stop(trainer, f"{name} is not finite")

    def _stop(self, trainer: L.Trainer, what: str) -> NoReturn:
        saved = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        files = [Path(callback.best_model_path) for callback in saved]  # named before they are written
        written = [file for file in files if file.is_file()]
        good = max(written, key=lambda file: file.stat().st_mtime) if written else "none yet"
        raise UserError(
            f"{what} at step {trainer.global_step}: training diverged; lower optimizer.lr or lengthen "
            f"scheduler.warmup; last good checkpoint: {good}"
        )
