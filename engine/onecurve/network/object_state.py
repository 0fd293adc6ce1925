"""The state of Python objects: what containers, plain objects, generators, arrays and tensors hold."""

import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from onecurve.network.tensors import to_local
from onecurve.patches.torch import tree_leaves

Restore = Callable[[], None]
# What no code can change in place.
_ATOMS: frozenset[type] = frozenset({bool, int, float, complex, str, bytes, type(None)})
_SIMPLE: tuple[type, ...] = (*_ATOMS, list, tuple, dict, set, frozenset, deque, np.ndarray, np.generic, Tensor)
# Objects of these, such as a trainer, a dataset or an optimizer, also of a user's subclass, have code of their own.
_CLOSED = frozenset("lightning lightning_fabric numpy onecurve pytorch_lightning torch torchmetrics unittest".split())
_MANY = 10_000  # a container with more elements holds data, which are not searched
_MOST_BYTES = 2**30  # of the copies of arrays and tensors within containers and objects


class Snapshot:
    """Copies of what objects hold, and what these hold in turn, which it puts back into the same objects.

    Others may hold an object as well, so each keeps its identity. What it cannot copy keeps its present state.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # it holds the objects, so that no other gets their ids
        self._restores: list[Restore] = []
        self._bytes = 0

    def add(self, values: Iterable[Any]) -> None:
        """Copy the state of objects, the nearest first."""
        queue = deque(values)
        while queue:
            value = queue.popleft()
            if self.is_new(value):
                queue.extend(self.record(value))

    def restore(self) -> None:
        """Put the state back, also more than once."""
        for restore in self._restores:
            restore()

    def is_new(self, value: Any) -> bool:
        """Return whether an object was not met before."""
        is_new = id(value) not in self._seen
        self._seen[id(value)] = value
        return is_new

    def record(self, value: Any) -> Sequence[Any]:
        """Copy what an object itself holds; return the objects in it."""
        if isinstance(value, Tensor | np.ndarray):
            self._bytes += value.nbytes
            if self._bytes <= _MOST_BYTES:
                self.keep(_restore_of_array(value))
        elif (state := generator_state(value)) is not None:
            self.keep(partial(_set_generator_state, value, state))
        else:
            self.keep(_restore_of_container(value))
        return parts_of(value)

    def keep(self, restore: Restore | None) -> None:
        """Keep a function that puts a part of the state back."""
        if restore is not None:
            self._restores.append(restore)


def is_same(value: Any, before: Any) -> bool:
    """Compare two numbers, arrays or tensors; NaN is the same as NaN."""
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        if value.shape != before.shape:
            return False
        before = before.to(value.device)
        return bool(((value == before) | ((value != value) & (before != before))).all())
    if isinstance(value, np.ndarray) and isinstance(before, np.ndarray):
        return np.array_equal(value, before, equal_nan=True)
    are_numbers = not any(isinstance(one, Tensor | np.ndarray) for one in (value, before))
    return are_numbers and (value == before or (value != value and before != before))


def are_equal(a: Any, b: Any) -> bool:
    """Return whether two batches have the same arrays and tensors; parts of other types are not compared."""
    ours, theirs = tree_leaves(a), tree_leaves(b)
    return len(ours) == len(theirs) and all(_are_equal_leaves(x, y) for x, y in zip(ours, theirs, strict=True))


def _are_equal_leaves(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())  # NaN is equal to NaN
    if isinstance(x, str | int | np.ndarray):
        return np.array_equal(x, y)
    return True


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield the numbers, arrays and tensors that an object holds, but for weights; a generator holds its state."""
    queue, seen, size = deque([value]), dict[int, Any](), 0
    while queue:
        value = queue.popleft()
        if isinstance(value, int | float | complex | np.number):
            yield value
        elif isinstance(value, Tensor | np.ndarray):
            is_state = value.dtype.kind in "biufc" if isinstance(value, np.ndarray) else is_dense(value)
            size += value.nbytes if is_state else 0
            if is_state and size <= _MOST_BYTES and not isinstance(value, nn.Parameter):
                yield value
        elif id(value) not in seen:
            seen[id(value)] = value
            queue.append(generator_state(value))
            queue.extend(parts_of(value, with_atoms=True))


def parts_of(value: Any, with_atoms: bool = False) -> list[Any]:
    """Return the objects in a container or plain object, with or without numbers and strings."""
    parts: Collection[Any]
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple | deque | set | frozenset):
        parts = value
    else:
        parts = list(_attributes_of(value).values()) if _is_open(value) else []
    return [part for part in parts if with_atoms or type(part) not in _ATOMS] if len(parts) <= _MANY else []


def generator_state(value: Any) -> Any:
    """Return a copy of the state of a generator of random numbers, and None for other objects."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state()
    is_random = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    return value.getstate() if is_random else None


def _set_generator_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        (generator.setstate if isinstance(generator, random.Random) else generator.set_state)(state)


def _restore_of_array(value: Any) -> Restore | None:
    if isinstance(value, Tensor):
        return restore_of_tensor(value)
    is_plain = type(value) is np.ndarray and value.flags.writeable  # others may lie in a file
    return partial(np.copyto, value, value.copy()) if is_plain else None


@torch.no_grad()
def restore_of_tensor(tensor: Tensor) -> Restore | None:
    """Return a function that gives a tensor its values back, and its memory after `tensor.data = ...`."""
    if not is_dense(tensor):
        return None
    data = to_local(tensor).detach()
    return partial(_restore_tensor, tensor, data, data.clone())


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has elements in memory, one after the other."""
    return not (is_lazy(tensor) or tensor.is_meta or tensor.is_nested) and tensor.layout is torch.strided


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


def _restore_of_container(value: Any) -> Restore | None:
    if isinstance(value, list | deque):
        return partial(_restore_sequence, value, list(value))
    if isinstance(value, set):
        return partial(_restore_set, value, set(value))
    if isinstance(value, dict):
        return partial(restore_dict, value, dict(value))
    return partial(_restore_object, value, _attributes_of(value)) if _is_open(value) else None


def _restore_sequence(value: Any, before: list[Any]) -> None:
    if not _are_identical(value, before):
        value.clear()
        value.extend(before)


def _restore_set(value: set[Any], before: set[Any]) -> None:
    if value != before:
        value.clear()
        value.update(before)


def restore_dict(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Give a dictionary its items back, in their order."""
    if not (_are_identical(value, before) and _are_identical(value.values(), before.values())):
        value.clear()
        value.update(before)


def _are_identical(now: Any, before: Any) -> bool:
    return len(now) == len(before) and all(map(_is, now, before))


def _is(one: Any, other: Any) -> bool:
    return one is other


def _is_open(value: Any) -> bool:
    """Return whether the attributes of an object are its state, which can be set.

    So it is for objects of a user's class, and of a library's if they hold numbers and containers only: others may be
    connections, threads or registries.
    """
    kind = type(value)
    if isinstance(value, type) or kind.__module__ == "builtins" or kind in _SIMPLE:
        return False
    if {base.__module__.split(".")[0] for base in kind.__mro__} & _CLOSED:
        return False
    return not _is_of_library(kind) or all(isinstance(part, _SIMPLE) for part in _attributes_of(value).values())


def _is_of_library(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return is_installed or kind.__module__.split(".")[0] in sys.stdlib_module_names


def _attributes_of(value: Any) -> dict[Any, Any]:
    """Return a copy of the attributes of an object by name, or by descriptor if they lie in `__slots__`."""
    slots = {slot: slot.__get__(value) for slot in _slots_of(value) if _has(slot, value)}
    return {**getattr(value, "__dict__", {}), **slots}


def _slots_of(value: Any) -> list[Any]:
    bases = [base for base in type(value).__mro__ if "__slots__" in vars(base)]
    members = [member for base in bases for member in vars(base).values()]
    return [member for member in members if isinstance(member, MemberDescriptorType)]


def _has(slot: Any, value: Any) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:  # it has no value yet
        return False
    return True


def _restore_object(value: Any, before: dict[Any, Any]) -> None:
    named = {name: part for name, part in before.items() if isinstance(name, str)}
    restore_dict(getattr(value, "__dict__", {}), named)
    for slot in _slots_of(value):
        if slot in before:
            slot.__set__(value, before[slot])
        elif _has(slot, value):
            slot.__delete__(value)
