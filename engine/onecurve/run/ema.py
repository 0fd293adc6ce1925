"""Exponential moving average of the weights, for evaluation and checkpoints."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from onecurve.errors import UserError
from onecurve.network.tensors import to_local, upcast_half, with_versions


class EMA(L.Callback):
    """Averages weights and batch statistics over the optimizer steps (Polyak and Juditsky, 1992).

    Validation and test use the average. A checkpoint's `state_dict` is the average too, so that a reader gets the
    evaluated weights; `training_state_dict` holds the weights in training. Each rank averages the tensors or shards
    that it holds, by name. (torch's AveragedModel copies the module, which fails for sharded modules, and pairs tensors
    by their order.)

    Args:
        decay: fraction of the average that one step keeps; at most (1 + step) / (10 + step), which lowers it in the
            first steps.
    """

    averages_weights = True  # strategies that average weights themselves refuse it

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise UserError(f"callbacks.ema.decay={decay}: give a fraction of at least 0 and less than 1")
        self.decay = decay
        self._average: dict[str, Tensor] = {}
        self._training_weights: dict[str, Tensor] = {}  # empty unless the module holds the average
        self._restored_average: dict[str, Tensor] = {}  # full tensors of a checkpoint, until training starts
        self._step = 0  # last step in the average

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if any(getattr(callback, "save_weights_only", False) for callback in trainer.checkpoint_callbacks):
            raise UserError("save_weights_only omits the average of callbacks.ema from checkpoints: set it to false")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._average = _copy_in_float32(pl_module)
        if self._restored_average:
            self._swap_weights(trainer, pl_module)
            self._load_restored_average(trainer, pl_module)
            self._average = _copy_in_float32(pl_module)
            self._swap_weights(trainer, pl_module)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._restored_average:  # training did not start, because the run was finished already
            self._load_restored_average(trainer, pl_module)
        self._average, self._training_weights = {}, {}

    def _load_restored_average(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Load the average into the module; the strategy gives each rank its shards of the full tensors."""
        trainer.strategy.load_model_state_dict({"state_dict": self._restored_average}, strict=module.strict_loading)
        self._restored_average = {}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._average:
            return
        self._update_average(trainer, pl_module)
        module_holds_average = bool(self._training_weights)
        current = _clone(checkpoint["state_dict"])  # the swaps change the module's tensors
        self._swap_weights(trainer, pl_module)
        swapped = _clone(trainer.strategy.lightning_module_state_dict())
        self._swap_weights(trainer, pl_module)
        average, training = (current, swapped) if module_holds_average else (swapped, current)
        checkpoint["state_dict"], checkpoint["training_state_dict"] = average, training

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the checkpoint's average until training starts, and load the weights in training."""
        if trainer.training and "training_state_dict" in checkpoint:
            self._restored_average = checkpoint["state_dict"]
            weights = {"state_dict": checkpoint["training_state_dict"]}
            trainer.strategy.load_model_state_dict(weights, strict=pl_module.strict_loading)

    @torch.no_grad()
    def _update_average(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        """Add the weights after the latest step to the average, unless it contains them already."""
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        decay = min(self.decay, (1 + self._step) / (10 + self._step))
        tensors = _local_tensors(pl_module)
        names = [name for name, tensor in tensors.items() if tensor.is_floating_point()]
        averages = [self._average[name] for name in names]
        weights = [tensors[name].to(average.dtype) for name, average in zip(names, averages, strict=True)]
        get_ema_multi_avg_fn(decay)(averages, weights, None)
        for name in tensors.keys() - names:  # batch counts of batch normalization
            self._average[name].copy_(tensors[name])

    on_train_batch_end = _update_average

    @torch.no_grad()
    def _swap_weights(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Swap the average and the weights in training in the module; do nothing without an average."""
        if not self._average:
            return
        tensors = _local_tensors(pl_module)
        if self._training_weights:
            new, self._training_weights = self._training_weights, {}
        else:
            new, self._training_weights = self._average, {name: tensor.clone() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            tensor.copy_(new[name])

    on_validation_start = on_validation_end = _swap_weights
    on_train_end = _swap_weights  # leaves the average in the module, for test and prediction


def _clone(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # `get_extra_state` of a layer may return any object.
    return with_versions({name: one.clone() if isinstance(one, Tensor) else one for name, one in state.items()}, state)


def _local_tensors(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: to_local(one) for name, one in module.state_dict().items() if isinstance(one, Tensor)}


def _copy_in_float32(module: L.LightningModule) -> dict[str, Tensor]:
    """Copy the module's tensors, in float32 if they are in half precision, where rounding would lose small steps."""
    return {name: upcast_half(tensor).clone() for name, tensor in _local_tensors(module).items()}
