"""A run that goes on within an epoch: the hooks of the epoch's start come again, and what they train is undone."""

import copy
from collections.abc import Mapping
from typing import Any, cast

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from onecurve.network.tensors import to_local


class BegunEpoch(L.Callback):
    """Undoes what `on_train_epoch_start` changes in an epoch that goes on: the checkpoint has it already.

    The hook is called, as it may prepare data or make layers. It may also lower a rate, shrink weights, reset a buffer,
    or clear moments. `Attributes` does the same for numbers and tensors in attributes. Until the first step the weights
    and moments are twice in memory, once on the CPU; not if only this library and Lightning have such hooks.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._is_begun = False
        self._saved: _Trained | None = None

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        callbacks: list[L.Callback] = cast(Any, trainer).callbacks
        own = [one for one in callbacks if not type(one).__module__.startswith(("onecurve.", "lightning."))]
        has_hook = any(is_overridden("on_train_epoch_start", one) for one in (pl_module, *own))
        self._is_begun = trainer.training and has_hook and bool(checkpoint.get("has_begun_epoch"))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._is_begun:
            self._saved, self._is_begun = _Trained(trainer, pl_module), False

    def on_train_batch_start(self, *_: Any) -> None:
        if self._saved:
            self._saved.restore()
            self._saved = None


class _Trained:
    """A copy, in CPU memory, of the weights, buffers, optimizers and schedules of a run."""

    def __init__(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._module, saved = module, module.state_dict().keys()
        self._tensors = {name: _copy(one) for name, one in _tensors_of(module).items() if name in saved}
        self._optimizers = [_TrainedOptimizer(optimizer) for optimizer in trainer.optimizers]
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._schedules = [(schedule, copy.deepcopy(schedule.state_dict())) for schedule in schedules]

    def restore(self) -> None:
        """Put the values back where they were."""
        now = _tensors_of(self._module)  # a hook may have put another tensor in the place of one
        for name in self._tensors.keys() & now.keys():
            to_local(now[name].detach()).copy_(self._tensors[name])
        for optimizer in self._optimizers:
            optimizer.restore()
        for schedule, state in self._schedules:
            schedule.load_state_dict(state)


class _TrainedOptimizer:
    """A copy of the hyper-parameters and the moments of an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        groups = [{key: one for key, one in group.items() if key != "params"} for group in optimizer.param_groups]
        self._groups = copy.deepcopy(groups)
        self._states = {weight: dict(state) for weight, state in optimizer.state.items()}
        self._moments = {weight: _copies(state) for weight, state in self._states.items()}

    def restore(self) -> None:
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=False):  # a hook may add one
            group.update(values)
        for weight, state in self._states.items():
            for key, moment in self._moments[weight].items():
                to_local(state[key].detach()).copy_(moment)
            self._optimizer.state[weight] = state


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _copies(values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: _copy(one) for key, one in values.items() if isinstance(one, Tensor)}


def _copy(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in CPU memory, of a sharded one of this rank's shard."""
    return to_local(tensor.detach()).to("cpu", copy=True)
