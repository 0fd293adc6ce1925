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

    The loss is checked at every log point: what the step returns, where all ranks stop together, or `train/loss` of a
    module that takes weighted batches, which is the same on every rank. All trained weights are checked before a
    checkpoint is saved, and its buffers: one may be infinite, as a mask of attention is, but not NaN. If ranks hold
    different weights, or no `train/loss` is logged, one rank may stop alone; the launcher then ends the others.
    """

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        if not is_log_point(trainer, trained_steps(trainer)):
            return
        loss = outputs.get("loss", 0.0) if isinstance(outputs, dict) else 0.0
        if getattr(pl_module, "takes_batch", False):  # without communication, as some ranks only may log the loss
            loss = float(trainer.callback_metrics.get("train/loss", loss))
            if not math.isfinite(loss):
                raise _divergence(trainer, f"train/loss is {loss}")
        elif not trainer.strategy.reduce_boolean_decision(bool(torch.as_tensor(loss).isfinite().all())):
            raise _divergence(trainer, "the training loss is not finite")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for name, weight in pl_module.named_parameters():
            if weight.requires_grad and not to_local(weight).isfinite().all():
                raise _divergence(trainer, f"{name} is not finite")
        for name, buffer in pl_module.named_buffers():
            values = to_local(buffer)
            is_number = not values.is_floating_point() or values.eq(values).all()  # NaN is not equal to itself
            if name in checkpoint["state_dict"] and not is_number:
                raise _divergence(trainer, f"{name} is NaN")


def _divergence(trainer: L.Trainer, problem: str) -> DivergedUserError:
    return DivergedUserError(
        f"{problem} at step {trained_steps(trainer)}: training diverged; lower optimizer.lr or lengthen "
        f"scheduler.warmup; the checkpoints in {trainer.default_root_dir}/checkpoints, if any, are from before"
    )
