"""A run that goes on within an epoch: the hooks of the epoch's start come again, and what they train is undone."""

import copy
from collections.abc import Mapping
from typing import Any

import lightning as L
from torch import Tensor

from onecurve.network.tensors import to_local


class BegunEpoch(L.Callback):
    """Undoes what `on_train_epoch_start` changes in an epoch that goes on: the checkpoint has it already.

    The hook is called, as it may prepare data or make layers. It may also lower a rate, shrink weights, reset a buffer,
    or clear moments. `Attributes` does the same for numbers and tensors in attributes.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._is_begun = False
        self._saved: _Trained | None = None

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._is_begun = trainer.training and bool(checkpoint.get("has_begun_epoch"))

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
        saved = module.state_dict().keys()
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._tensors = _copies({name: one for name, one in tensors.items() if name in saved})
        self._optimizers = [
            (
                optimizer,
                [
                    copy.deepcopy({key: one for key, one in group.items() if key != "params"})
                    for group in optimizer.param_groups
                ],
                {weight: (dict(state), _copies(state)) for weight, state in optimizer.state.items()},
            )
            for optimizer in trainer.optimizers
        ]
        self._schedules = [
            (config.scheduler, copy.deepcopy(config.scheduler.state_dict())) for config in trainer.lr_scheduler_configs
        ]

    def restore(self) -> None:
        """Put the values back where they were."""
        _put_back(self._tensors)
        for optimizer, groups, states in self._optimizers:
            for group, values in zip(optimizer.param_groups, groups, strict=False):  # a hook may have added one
                group.update(values)
            for weight, (state, copies) in states.items():
                _put_back(copies)
                optimizer.state[weight] = state
        for schedule, state in self._schedules:
            schedule.load_state_dict(state)


def _copies(values: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors, of a sharded one this rank's shard, each with a copy."""
    own = [to_local(one.detach()) for one in values.values() if isinstance(one, Tensor)]
    return [(tensor, tensor.to("cpu", copy=True)) for tensor in own]


def _put_back(copies: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in copies:
        tensor.copy_(value)
