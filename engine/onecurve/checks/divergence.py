"""A check that training has not diverged."""

import math
from typing import Any

import lightning as L
import torch

from onecurve.errors import DivergedUserError
from onecurve.network.tensors import to_local
from onecurve.observe.steps import is_log_point, trained_steps


class FiniteCheck(L.Callback):
    """Stops a run that has diverged.

    The loss is checked at every log point, where all ranks stop together: `train/loss` of a module that takes weighted
    batches and logs it, which is the same on every rank, or else what the step returns. All weights are checked before
    a checkpoint is saved. If ranks hold different weights, one rank may stop alone; the launcher then ends the others.
    """

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        if not is_log_point(trainer, trained_steps(trainer)):
            return
        if getattr(pl_module, "takes_batch", False) and "train/loss" in (logged := trainer.callback_metrics):
            loss = float(logged["train/loss"])
            if not math.isfinite(loss):
                raise _divergence(trainer, f"train/loss is {loss}")
            return
        loss = float(outputs.get("loss", 0.0)) if isinstance(outputs, dict) else 0.0
        if not trainer.strategy.reduce_boolean_decision(math.isfinite(loss)):
            raise _divergence(trainer, "the training loss is not finite")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for name, tensor in checkpoint["state_dict"].items():
            local = to_local(tensor)
            if local.is_floating_point() and not torch.isfinite(local).all():
                raise _divergence(trainer, f"{name} is not finite")


def _divergence(trainer: L.Trainer, problem: str) -> DivergedUserError:
    return DivergedUserError(
        f"{problem} at step {trained_steps(trainer)}: training diverged; lower optimizer.lr or lengthen "
        f"scheduler.warmup; the checkpoints in {trainer.default_root_dir}/checkpoints, if any, are from before"
    )
