"""A check for what changes in a run and is in no checkpoint."""

import hashlib
import logging
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from onecurve.network.module_state import all_attributes
from onecurve.network.object_state import leaves_of
from onecurve.run.replicas import bits

_log = logging.getLogger(__name__)


class UnsavedStateCheck(L.Callback):
    """Names, at the first save, what changes after the first step and no checkpoint holds.

    These are numbers and tensors within containers and objects, such as the rate of a moving average; schedules that
    the module steps itself; and buffers with `persistent=False`. `Attributes` saves numbers and tensors that are
    attributes themselves. A list that has grown is not named: most are emptied after an epoch.
    """

    _is_due = False  # a search for the learning rate saves before training starts
    _first: dict[str, list[Any]] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._is_due, self._first, self._begun = not is_overridden("on_save_checkpoint", pl_module), None, 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self._begun += 1
        if self._is_due and self._begun == 2:  # the first step makes what is made once, such as a table of positions
            self._first = dict(_unsaved(trainer, pl_module))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if not self._is_due or self._first is None:
            return
        self._is_due, now = False, dict(_unsaved(trainer, pl_module))
        # NaN is unequal to itself, but not its text.
        changed = [
            name
            for name, values in self._first.items()
            if name not in checkpoint["attributes"] and repr(now.get(name, [])[: len(values)]) != repr(values)
        ]
        self._first = None
        if changed:
            _log.warning(
                "no checkpoint holds %s, which training changes: a run that goes on begins with what the constructor "
                "gives. If the loss or a hook reads it, register it as a buffer, or save it in on_save_checkpoint",
                ", ".join(sorted(changed)),
            )


def _unsaved(trainer: L.Trainer, module: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    for name, value in all_attributes(module).items():
        if isinstance(value, LRScheduler):
            yield name, [] if value in schedules else [value.last_epoch]
        elif not (isinstance(value, Tensor) and value.requires_grad):  # which is of one step
            yield name, [_summary(leaf) for leaf in leaves_of(value)]
    saved = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name not in saved:
            yield name, [_summary(buffer)]


def _summary(leaf: Any) -> Any:
    """Return what tells a value from others, without its memory."""
    if isinstance(leaf, Tensor):
        return (*leaf.shape, *bits({"": leaf}).values())
    return hashlib.blake2b(leaf.tobytes()).hexdigest() if isinstance(leaf, np.ndarray) else leaf
