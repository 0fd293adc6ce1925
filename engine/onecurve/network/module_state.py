"""Attributes of modules; computing without a trace: in another mode, without logs, with the state restored."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import lightning as L
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric, MetricCollection

from onecurve.network.object_state import Restore, Snapshot, restore_of_tensor
from onecurve.patches.torch import AUTOCAST_FLAG, COMPILER_MARK

_INTERNAL = vars(nn.Module()).keys()  # attributes of torch's own
_OPTIONS = ("p", "momentum", "eps")  # of layers of torch
_OTHERS = {*vars(L.LightningModule()), AUTOCAST_FLAG}  # attributes of any module


def all_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of the user's modules by name, metrics and layers of this library left out."""
    found = {}
    for name, part in module.named_modules():
        is_own = type(part).__module__.startswith("onecurve.")  # a layer of torch that is another kind here
        weights = [key for key, _ in part.named_parameters(recurse=False)]
        # `weight` of `weight_v`, as by weight_norm, and of `weight_orig`, as by spectral_norm and pruning
        computed = {key.rpartition("_")[0] for key in weights if key.endswith(("_v", "_orig"))}
        for key, value in {} if isinstance(part, Metric | MetricCollection) else vars(part).items():
            of_torch = key in _OTHERS or key in computed or key.startswith(COMPILER_MARK)
            if not of_torch and (not is_own or key in _OPTIONS):
                found[f"{name}.{key}".lstrip(".")] = value
    return found


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return the numbers and tensors that are attributes of the user's modules, by name."""
    found = all_attributes(module)
    return {name: value for name, value in found.items() if isinstance(value, int | float | Tensor)}


@contextmanager
def set_mode(net: nn.Module, training: bool) -> Iterator[None]:
    """Set the mode of all modules, and restore each module's own mode."""
    before = {module: module.training for module in net.modules()}
    net.train(training)
    try:
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training


def without_log(module: L.LightningModule) -> Any:
    """Return a context in which the module can log although no trainer's loop runs; `log_dict` calls `log`, a mock."""
    return mock.patch.object(module, "log")


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[Restore]:
    """Restore all that a pass may change in modules; the context's value is a function that does so in between.

    Modules get their attributes back, buffers and weights; containers, plain objects and generators of random numbers
    that are attributes get back what they held (`Snapshot`). A buffer keeps its shape.
    """
    snapshot = _ModuleSnapshot(modules)
    try:
        yield snapshot.restore
    finally:
        snapshot.restore()


class _ModuleSnapshot(Snapshot):
    """Copies of what modules hold, also those that are in a container and so no parts of others."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self._parts = set(modules)
        self.add(self._parts)

    def record(self, value: Any) -> Sequence[Any]:
        if not isinstance(value, nn.Module):
            return super().record(value)
        attributes, weights, buffers = _attributes(value), _weights_of(value), _buffers_of(value)
        self.keep(partial(_restore_attributes, value, attributes))
        self.keep(partial(_restore_weights, value, weights))
        self.keep(partial(_restore_buffers, value, buffers, set(dir(value))))
        for tensor in [*weights.values(), *buffers.values(), *attributes.values()]:
            if isinstance(tensor, Tensor) and self.is_new(tensor):
                self.keep(restore_of_tensor(tensor))
        others = [] if value in self._parts else value.children()
        return [*attributes.values(), *others]


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in _INTERNAL}


def _restore_attributes(part: nn.Module, before: dict[str, Any]) -> None:
    for name in _attributes(part).keys() - before.keys():
        vars(part).pop(name)
    vars(part).update(before)


def _weights_of(part: nn.Module) -> dict[str, Tensor]:
    return dict(part.named_parameters(recurse=False, remove_duplicate=False))


def _restore_weights(part: nn.Module, before: dict[str, Tensor]) -> None:
    """Give a module its own weights back, but for those of FSDP, which itself sets gathered and sharded ones."""
    now = _weights_of(part)
    for name, weight in before.items():
        if now.get(name) is not weight and not any(isinstance(each, DTensor) for each in (weight, now.get(name))):
            setattr(part, name, weight)


def _buffers_of(part: nn.Module) -> dict[str, Tensor]:
    return dict(part.named_buffers(recurse=False, remove_duplicate=False))


def _restore_buffers(part: nn.Module, before: dict[str, Tensor], names: set[str]) -> None:
    """Give a module its own buffers back, whose values may have changed; it had these `names` of attributes before."""
    for name in _buffers_of(part).keys() - before.keys():
        if name in names:  # it was None
            setattr(part, name, None)
        else:
            delattr(part, name)
    for name, buffer in before.items():
        if name in vars(part) or not hasattr(part, name):  # it was deleted, perhaps for another attribute
            vars(part).pop(name, None)
            part.register_buffer(name, buffer)
        else:
            setattr(part, name, buffer)
