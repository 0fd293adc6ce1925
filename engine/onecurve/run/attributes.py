"""Numbers and tensors in attributes of modules and callbacks, which Lightning does not save."""

from typing import Any, cast

import lightning as L
import numpy as np
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor

from onecurve.network.module_state import attributes, plain_callbacks
from onecurve.network.object_state import is_dense, is_same
from onecurve.process.gather import names_that_differ


class Attributes(L.Callback):
    """Saves numbers and tensors in attributes that training changes, such as a count of the steps, and restores them.

    These are attributes of modules, and of callbacks without a `state_dict`. What is set before the first epoch and not
    changed later is not restored, as an option, but for what LearningRateFinder has found; nor are numbers that the
    ranks have different, as the seed of a rank.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._first: dict[str, Any] | None = None  # attributes before the first epoch of this process
            self._saved: dict[str, Any] = {}  # those of a checkpoint, until they are restored
            self._has_begun_epoch = False  # in which the checkpoint was saved
            searches = any(isinstance(one, LearningRateFinder) for one in cast(Any, trainer).callbacks)
            self._before_search = _copies(attributes(pl_module)) if searches else None

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.training:
            self._saved = checkpoint.get("attributes", {})
            self._has_begun_epoch = bool(checkpoint.get("has_begun_epoch"))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Restore before the module's own hook, if the uninterrupted run came to this epoch with these values."""
        if self._first is None:
            self._first = _copies(_attributes(trainer, pl_module))
            if self._before_search is not None:
                self._first |= {name: self._before_search.get(name) for name in attributes(pl_module)}
        if not self._has_begun_epoch:
            self._restore(trainer, pl_module)

    def _restore(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any, **__: Any) -> None:
        """Restore the attributes of a checkpoint, once. Every rank must call it."""
        if not self._saved:
            return
        parts = {**dict(pl_module.named_modules()), **plain_callbacks(trainer)}
        numbers = {key: one for key, one in _attributes(trainer, pl_module).items() if not isinstance(one, Tensor)}
        of_ranks = names_that_differ(numbers)  # such as the seed of a rank, which a hook has set
        for name, value in self._saved.items():
            path, _dot, key = name.rpartition(".")
            if path in parts and name not in of_ranks:  # edited code may have another path
                own = vars(parts[path])
                present = own.get(key)
                device = present.device if isinstance(present, Tensor) else pl_module.device
                own |= {key: value.to(device) if isinstance(value, Tensor) else value}
        self._saved = {}

    on_train_batch_start = _restore
    on_fit_end = _restore  # for a test, if the run had ended before

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        first = self._first or {}
        now = {} if self._first is None else _attributes(trainer, pl_module)
        changed = {name: value for name, value in now.items() if name not in first or not is_same(value, first[name])}
        on_cpu = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in changed.items()}
        checkpoint["attributes"] = on_cpu | self._saved


def _copies(found: dict[str, Any]) -> dict[str, Any]:
    return {name: one.clone() if isinstance(one, Tensor) else one for name, one in found.items()}


def _attributes(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
    """Return the numbers and tensors that are attributes of modules and callbacks, by name.

    A tensor with a gradient belongs to a step.
    """
    found = attributes(module)
    for path, callback in plain_callbacks(trainer).items():
        found |= {f"{path}.{key}": value for key, value in vars(callback).items()}
    found = {name: value.item() if isinstance(value, np.generic) else value for name, value in found.items()}
    numbers = {name: value for name, value in found.items() if type(value) in (bool, int, float)}
    tensors = {name: value for name, value in found.items() if type(value) is Tensor and not value.requires_grad}
    return numbers | {name: tensor for name, tensor in tensors.items() if is_dense(tensor)}
