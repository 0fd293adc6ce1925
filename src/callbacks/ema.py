"""Exponential moving average of the weights, for evaluation and checkpoints."""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from src.utils.errors import UserError


class EMA(L.Callback):
    """Averages the weights over the optimizer's steps (Polyak and Juditsky, 1992), batch statistics with them.

    Validation and test use the average. A checkpoint's `state_dict` is the average too, so that whoever reads it gets
    what was evaluated; the weights in training are beside it, as `training_state_dict`. Each rank averages what it
    holds, by name, whole or not. (torch's AveragedModel pairs tensors by their order, and copies the module, which
    sharded ones do not survive.)

    Args:
        decay: share of the average that a step keeps; less in the first steps, where it is (1 + step) / (10 + step).

    Raises:
        UserError: if that is no share, or checkpoints are saved in a way that leaves the average out.
    """

    averages_weights = True  # strategies that average weights themselves refuse it

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"callbacks.ema.decay={decay}: give a share of at least 0 and less than 1")
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        self._training_weights: dict[str, Tensor] = {}  # while the module holds the average
        self._restored: dict[str, Tensor] = {}
        self._step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if any(getattr(callback, "save_weights_only", False) for callback in trainer.checkpoint_callbacks):
            raise UserError("save_weights_only leaves out the average that callbacks.ema keeps: set it to false")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._average = _precise_copies(pl_module)
        if self._restored:
            self._swap_weights(pl_module)
            # Through the strategy, which gives each rank what it holds of a whole tensor.
            trainer.strategy.load_model_state_dict({"state_dict": self._restored})
            self._average = _precise_copies(pl_module)
            self._swap_weights(pl_module)
            self._restored = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._catch_up(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap_weights(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap_weights(pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the average in the module, for whatever comes after."""
        if self._restored:  # the run was finished already, so that training did not start
            trainer.strategy.load_model_state_dict({"state_dict": self._restored})
            self._restored = {}
        self._swap_weights(pl_module)
        self._average, self._training_weights = {}, {}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._average:
            return
        self._catch_up(trainer, pl_module)
        roles = ("state_dict", "training_state_dict")
        held, other = roles if self._training_weights else reversed(roles)  # what the module holds at the moment
        state = checkpoint["state_dict"]
        self._swap_weights(pl_module)
        exchanged: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
        checkpoint[other] = {name: tensor.clone() for name, tensor in exchanged.items()}
        self._swap_weights(pl_module)
        checkpoint[held] = state

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the module's weights for the average, and go on training with the others."""
        if trainer.training and "training_state_dict" in checkpoint:
            self._restored = checkpoint["state_dict"]
            trainer.strategy.load_model_state_dict({"state_dict": checkpoint["training_state_dict"]})

    @torch.no_grad()
    def _catch_up(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Average the latest step in, unless that is done."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        live, decay = _local_tensors(module), min(self.decay, (1 + self._step) / (10 + self._step))
        floats = [name for name, tensor in live.items() if tensor.is_floating_point()]
        averages = [self._average[name] for name in floats]
        current = [live[name].to(average.dtype) for name, average in zip(floats, averages, strict=True)]
        get_ema_multi_avg_fn(decay)(averages, current, None)
        for name in live.keys() - floats:  # counts of batches
            self._average[name].copy_(live[name])

    @torch.no_grad()
    def _swap_weights(self, module: L.LightningModule) -> None:
        """Swap the averaged and the training weights in the module; do nothing without an average."""
        live = _local_tensors(module) if self._average else {}
        incoming = self._training_weights or self._average
        self._training_weights = (
            {} if self._training_weights else {name: tensor.clone() for name, tensor in live.items()}
        )
        for name, tensor in live.items():
            tensor.copy_(incoming[name])


def _local_tensors(module: L.LightningModule) -> dict[str, Tensor]:
    """Return the tensors, or shards, that this rank has in memory."""
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for name, tensor in module.state_dict().items()
    }


def _precise_copies(module: L.LightningModule) -> dict[str, Tensor]:
    """Copies in which small steps are not lost to rounding."""
    return {
        name: tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.clone()
        for name, tensor in _local_tensors(module).items()
    }
