"""A run that goes on within an epoch: the hooks of the epoch's start come again, and what they train is undone."""

import copy
from collections.abc import Mapping
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateMonitor
from torch import Tensor, nn
from torch.optim import Optimizer

from onecurve.network.module_state import with_own_hook
from onecurve.network.tensors import to_local


class BegunEpoch(L.Callback):
    """Undoes what `on_train_epoch_start` changes in an epoch that goes on: the checkpoint has it already.

    The hook is called, as it may prepare data or make layers. It may also lower a rate, shrink weights, reset a buffer,
    or clear moments. `Attributes` does the same for numbers and tensors in attributes. Until the first step the weights
    and moments are twice in memory, once on the CPU; not if only this library and Lightning have such hooks, of which
    those that would raise or log a rate twice are left out.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._must_undo = False
        self._saved: _Trained | None = None

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.training and checkpoint.get("has_begun_epoch"):
            self._must_undo = bool(with_own_hook(trainer, "on_train_epoch_start"))
            # The row of the first step is logged again, and has the rate of the epoch.
            has_steps = checkpoint["position"]["epoch_steps"] > 0
            kinds = (BaseFinetuning, LearningRateMonitor) if has_steps else BaseFinetuning
            for callback in cast(Any, trainer).callbacks:
                if isinstance(callback, kinds):
                    _skip_epoch_start(callback)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._must_undo:
            self._saved, self._must_undo = _Trained(trainer, pl_module), False

    def on_train_batch_start(self, *_: Any) -> None:
        if self._saved:
            self._saved.restore()
            self._saved = None


def _skip_epoch_start(callback: Any) -> None:
    """Leave out its next `on_train_epoch_start`."""
    callback.on_train_epoch_start = lambda *_: vars(callback).pop("on_train_epoch_start")


class _Trained:
    """A copy, in CPU memory, of the weights, buffers, optimizers and schedules of a run."""

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._module = module
        saved, tensors = module.state_dict().keys(), _tensors_of(module)
        self._tensors = _copies({name: tensors[name] for name in tensors.keys() & saved})
        self._options = [(optimizer, _options_of(optimizer)) for optimizer in trainer.optimizers]
        self._moments = [
            (optimizer, weight, dict(state), _copies(state))
            for optimizer in trainer.optimizers
            for weight, state in optimizer.state.items()
        ]
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._schedules = [(schedule, copy.deepcopy(schedule.state_dict())) for schedule in schedules]

    def restore(self) -> None:
        _write(self._tensors, _tensors_of(self._module))  # a hook may have put another tensor in the place of one
        for optimizer, options in self._options:
            for group, values in zip(optimizer.param_groups, options, strict=False):  # a hook may add or replace them
                group.update(values)
        for optimizer, weight, state, moments in self._moments:
            _write(moments, state)
            optimizer.state[weight] = state
        for schedule, state in self._schedules:
            schedule.load_state_dict(state)


def _options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    groups = optimizer.param_groups
    return copy.deepcopy([{key: value for key, value in group.items() if key != "params"} for group in groups])


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _copies(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return copies of tensors in CPU memory, of sharded ones of this rank's shards."""
    tensors = {key: one for key, one in values.items() if isinstance(one, Tensor)}
    return {key: to_local(one.detach()).to("cpu", copy=True) for key, one in tensors.items()}


def _write(copies: dict[str, Tensor], tensors: Mapping[str, Any]) -> None:
    for key in copies.keys() & tensors.keys():
        to_local(tensors[key].detach()).copy_(copies[key])
