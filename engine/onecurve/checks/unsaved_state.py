"""A check for what changes in a run and is in no checkpoint."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onecurve.checks.replicas import summary
from onecurve.network.module_state import all_attributes, plain_callbacks
from onecurve.network.object_state import leaves_of
from onecurve.network.tensors import to_local
from onecurve.patches.torch import tree_leaves

_log = logging.getLogger(__name__)
_SAVED = {*vars(Optimizer([nn.Parameter()], {})), "_step_count", "_opt_called"}  # a schedule sets some


class UnsavedStateCheck(L.Callback):
    """Names what changes after the first step and no checkpoint holds, at the saves of this epoch and the next two.

    These are numbers and tensors within containers and objects of modules and callbacks, such as a moving average;
    schedules that the module steps itself; buffers with `persistent=False`; what an optimizer keeps besides its
    `state`, as one that wraps another; and gradients that a module adds up over batches. `Attributes` saves numbers and
    tensors that are attributes themselves. A list of a module that grows is named if no epoch empties it, such as one
    of the norms by which the module clips; those of callbacks are most often records.
    """

    _first: dict[str, list[Any]] | None = None
    _begun, _updates = 0, 0  # a search for the learning rate saves before training starts

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first, self._begun, self._named = None, 0, set[str]()
        self._lengths, self._grown = dict[str, int](), set[str]()  # at the first batch of an epoch

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, _: Any, batch_idx: int) -> None:
        self._begun, self._updates = self._begun + 1, trainer.global_step  # of all optimizers
        if self._first is not None and batch_idx == 0:
            before, values = self._lengths, all_attributes(pl_module)
            self._lengths = {name: len(list(leaves_of(value))) for name, value in values.items()}
            self._grown = {name for name, length in self._lengths.items() if length > before.get(name, length)}
        if self._begun == 2 and not is_overridden("on_save_checkpoint", pl_module):
            # The first step makes what is made once, such as a table of positions.
            self._first, self._epoch = dict(_unsaved(trainer, pl_module)), trainer.current_epoch

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._begun and not pl_module.automatic_optimization:
            self._name_gradients(trainer, pl_module)
        if self._first is None:
            return
        now, changed = dict(_unsaved(trainer, pl_module)), set(self._grown)
        for name, values in self._first.items():
            # NaN is unequal to itself, but not its text.
            if len(later := now.get(name, [])) == len(values) and repr(later) != repr(values):
                changed.add(name)
        changed -= checkpoint["attributes"].keys()
        if trainer.current_epoch > self._epoch + 1:
            self._first = None
        if changed - self._named:
            _log.warning(
                "no checkpoint holds %s, which training changes: a run that goes on begins with what the constructor "
                "gives. If the loss or a hook reads it, make it a persistent buffer, or save it in on_save_checkpoint",
                ", ".join(sorted(changed - self._named)),
            )
        self._named |= changed

    def _name_gradients(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Warn if the latest batch has updated no weights, and so its gradients are for a later update."""
        has_updated = trainer.global_step != self._updates or trainer.global_step == 0
        has_gradients = any(weight.grad is not None for weight in module.parameters())
        if has_gradients and not has_updated and "gradients" not in self._named:
            self._named.add("gradients")
            _log.warning(
                "no checkpoint holds gradients, such as those that the module has added up since its last optimizer "
                "step: let trainer.accumulate_grad_batches divide a larger batch instead"
            )


def _unsaved(trainer: L.Trainer, module: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    for name, value in all_attributes(module).items():
        if isinstance(value, LRScheduler):
            yield name, [] if value in schedules else [value.last_epoch]
        elif not (isinstance(value, Tensor) and value.requires_grad):  # which is of one step
            yield name, _summaries(leaves_of(value))
    own = set(module.modules())
    for path, callback in plain_callbacks(trainer).items():
        for name, value in {} if is_overridden("on_save_checkpoint", callback) else vars(callback).items():
            is_copy = isinstance(value, nn.Module) and value not in own  # such as one that averages the weights
            yield f"{path}.{name}", _summaries(value.state_dict().values() if is_copy else leaves_of(value))
    for number, optimizer in enumerate(trainer.optimizers):
        is_known = type(optimizer).__module__.startswith(("torch.", "onecurve."))
        for name, value in () if is_known else vars(optimizer).items():
            leaves = _unsaved_of_inner(optimizer, value) if isinstance(value, Optimizer) else leaves_of(value)
            if name not in _SAVED:
                yield f"{name} of optimizer {number}", _summaries(leaves)
    saved = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name not in saved:
            yield name, _summaries([buffer])


def _summaries(leaves: Iterable[Any]) -> list[Any]:
    return [summary(to_local(leaf) if isinstance(leaf, Tensor) else leaf) for leaf in leaves]


def _unsaved_of_inner(optimizer: Optimizer, inner: Optimizer) -> list[Any]:
    """Return the tensors that an optimizer within another one keeps, and the state dict of the outer one lacks."""
    saved = set(map(id, tree_leaves(optimizer.state_dict())))
    return [leaf for leaf in leaves_of(inner.state) if isinstance(leaf, Tensor) and id(leaf) not in saved]
