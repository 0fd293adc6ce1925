"""Computing with modules without a trace: in another mode, without logs, with their state restored."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn

from onecurve.network.tensors import to_local

_INTERNAL = vars(nn.Module()).keys()  # attributes of torch's own


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
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the attributes of modules, such as the states of metrics, their buffers, and frozen weights.

    Lists and dictionaries get their elements back; what other objects hold is not restored. A buffer keeps its shape.
    """
    attributes = [(part, {name: _copy(value) for name, value in _attributes(part).items()}) for part in modules]
    buffers = [(part, _buffers_of(part), set(dir(part))) for part, _ in attributes]
    tensors = []
    for part, _ in attributes:
        frozen = [weight for weight in part.parameters(recurse=False) if not weight.requires_grad]
        tensors += [(tensor, tensor.clone()) for tensor in map(to_local, [*frozen, *part.buffers(recurse=False)])]
    try:
        yield
    finally:
        for part, before in attributes:
            for name in _attributes(part).keys() - before.keys():
                vars(part).pop(name)
            for name, value in before.items():
                _restore(part, name, value)
        for part, before, names in buffers:
            _restore_buffers(part, before, names)
        with torch.no_grad():
            for tensor, values in tensors:
                tensor.copy_(values)


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


def _attributes(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if name not in _INTERNAL}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return type(value)(value) if type(value) in (list, dict, set) else value


def _restore(part: nn.Module, name: str, value: Any) -> None:
    """Set an attribute; a list or dictionary stays the same object, which others may hold."""
    now = vars(part).get(name)
    if type(value) is list and type(now) is list:
        now[:] = value
    elif type(value) in (dict, set) and type(now) is type(value):
        now.clear()
        now.update(value)
    else:
        vars(part)[name] = value
