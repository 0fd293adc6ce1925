"""Computing without a trace: what a pass changes in modules, and in the objects that they hold, is restored."""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onecurve.network.object_state import (
    MOST_BYTES,
    attributes_of,
    generator_state,
    is_dense,
    is_open,
    parts_of_module,
    slots_of,
    walk,
)
from onecurve.network.tensors import to_local

_Restore = Callable[[], None]


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[_Restore]:
    """Restore all that a pass may change in modules; the context's value is a function that does so in between.

    Modules get their attributes back, buffers and weights; containers, plain objects and generators of random numbers
    that they hold get back what these held. Others may hold an object as well, so each keeps its identity. What cannot
    be copied keeps its present state, as do more than a GiB of data in containers and objects. Parts of a module that
    are not among `modules` are left alone.
    """
    given = set(modules)
    left_out = {child for module in given for child in module.children()} - given
    restores = [_restore_of(value) for value in _without_data(walk(given, left_out, opens_modules=True))]

    def restore() -> None:
        for each in filter(None, restores):
            each()

    try:
        yield restore
    finally:
        restore()


def _without_data(values: Iterable[Any]) -> Iterator[Any]:
    """Leave out arrays and tensors beyond the first GiB, but for those that a module itself holds."""
    of_modules, size = set[int](), 0  # ids of tensors
    for value in values:
        if isinstance(value, nn.Module):
            of_modules.update(map(id, [*vars(value).values(), *parts_of_module(value)]))
        is_array = isinstance(value, np.ndarray) or (isinstance(value, Tensor) and is_dense(value))
        is_data = is_array and id(value) not in of_modules
        size += value.nbytes if is_data else 0
        if not (is_data and size > MOST_BYTES):
            yield value


def _restore_of(value: Any) -> _Restore | None:
    """Return a function that gives an object the state back that it has now, if it has some."""
    if isinstance(value, Tensor):
        return _restore_of_tensor(value)
    if type(value) is np.ndarray and value.flags.writeable:  # others may lie in a file
        return partial(np.copyto, value, value.copy())
    if (state := generator_state(value)) is not None:
        return partial(_set_generator_state, value, state)
    if isinstance(value, list | deque | set | dict):
        return partial(_restore_container, value, dict(value) if isinstance(value, dict) else list(value))
    return partial(_restore_object, value, attributes_of(value)) if is_open(value) else None


@torch.no_grad()
def _restore_of_tensor(tensor: Tensor) -> _Restore | None:
    """Return a function that gives a tensor its values back, and its memory after `tensor.data = ...`."""
    if not is_dense(tensor):
        return None
    data = to_local(tensor).detach()
    return partial(_restore_tensor, tensor, data, data.clone())


@torch.no_grad()
def _restore_tensor(tensor: Tensor, data: Tensor, values: Tensor) -> None:
    if data.untyped_storage().nbytes() == 0:  # FSDP has freed the weights that it had gathered
        return
    if not isinstance(tensor, DTensor) and _memory(tensor) != _memory(data):
        tensor.data = data
    if not torch.equal(data, values):  # a write into a tensor that a graph holds would forbid its backward pass
        data.copy_(values)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


def _restore_container(value: Any, before: Any) -> None:
    """Give a container its content back, in its order; not weights of FSDP, which itself gathers and shards them."""
    now, then = _content(value), _content(before)
    has_shards = any(isinstance(part, DTensor) for part in (*now, *then))
    if not has_shards and not (len(now) == len(then) and all(map(is_, now, then))):
        value.clear()
        (value.extend if isinstance(value, list | deque) else value.update)(before)


def _content(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _restore_object(value: Any, before: dict[str, Any]) -> None:
    slots = slots_of(value)
    named = {name: part for name, part in before.items() if name not in slots}
    _restore_container(getattr(value, "__dict__", {}), named)
    for name in slots:
        if name in before:
            object.__setattr__(value, name, before[name])
        elif hasattr(value, name):
            object.__delattr__(value, name)
