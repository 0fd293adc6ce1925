"""What Python objects hold: containers, plain objects, generators, arrays and tensors; comparisons of it."""

import hashlib
import random
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from onecurve.patches.torch import tree_leaves

_NUMBERS = (int, float, complex, np.number)
_ATOMS = (*_NUMBERS, str, bytes, type(None))  # they hold nothing
_SIMPLE = (*_ATOMS, np.generic, list, tuple, dict, set, frozenset, deque, np.ndarray, Tensor)
# Objects of these, such as a trainer, a dataset or an optimizer, also of a user's subclass, have code of their own.
_CLOSED = frozenset("lightning lightning_fabric numpy onecurve pytorch_lightning torch torchmetrics unittest".split())
_MANY = 10_000  # a container with more elements holds data, which are not searched
MOST_BYTES = 2**30  # of the arrays and tensors that are searched or copied


def is_same(value: Any, before: Any) -> bool:
    """Compare two numbers, arrays or tensors; NaN is the same as NaN."""
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        if value.shape != before.shape:
            return False
        before = before.to(value.device)
        return bool(((value == before) | ((value != value) & (before != before))).all())
    if isinstance(value, np.ndarray) and isinstance(before, np.ndarray):
        return np.array_equal(value, before, equal_nan=value.dtype.kind in "fc")
    are_numbers = not any(isinstance(one, Tensor | np.ndarray) for one in (value, before))
    return are_numbers and (value == before or (value != value and before != before))


def are_equal(a: Any, b: Any) -> bool:
    """Return whether two batches have the same arrays and tensors; parts of other types are not compared."""
    ours, theirs = tree_leaves(a), tree_leaves(b)
    return len(ours) == len(theirs) and all(
        is_same(x, y)
        for x, y in zip(ours, theirs, strict=True)
        if isinstance(x, str | int | np.ndarray) or (isinstance(x, Tensor) and isinstance(y, Tensor))
    )


def digest_of(samples: list[Any]) -> str:
    """Return a hash of the tensors, arrays, numbers and texts in samples."""
    content = hashlib.sha256()
    for leaf in tree_leaves(samples):
        if isinstance(leaf, Tensor) and is_dense(leaf):
            content.update(leaf.cpu().resolve_conj().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray | str | int | float):
            content.update(repr(leaf).encode())
    return content.hexdigest()


def leaves_of(value: Any) -> Iterator[Any]:
    """Yield the numbers, arrays and tensors that an object holds, but for weights; a generator holds its state."""
    size = 0
    for part in walk([value]):
        if isinstance(part, _NUMBERS):
            yield part
        elif isinstance(part, Tensor | np.ndarray) and not isinstance(part, nn.Parameter):
            is_state = part.dtype.kind in "biufc" if isinstance(part, np.ndarray) else is_dense(part)
            size += part.nbytes if is_state else 0
            if is_state and size <= MOST_BYTES:
                yield part


def walk(values: Iterable[Any], left_out: Iterable[Any] = (), opens_modules: bool = False) -> Iterator[Any]:
    """Yield objects and what they hold, the nearest first, each once; numbers and texts as often as they are held."""
    queue, seen = deque(values), {id(value): value for value in left_out}  # objects, so that no other gets their ids
    while queue:
        value = queue.popleft()
        if id(value) not in seen:
            yield value
            if not isinstance(value, _ATOMS):
                seen[id(value)] = value
                is_opened = opens_modules and isinstance(value, nn.Module)
                queue.extend(parts_of_module(value) if is_opened else parts_of(value))


def parts_of_module(module: nn.Module) -> list[Any]:
    """Return what a module itself holds; the tensors of a scripted one are not in its attributes."""
    return [vars(module), *module.parameters(recurse=False), *module.buffers(recurse=False)]


def parts_of(value: Any) -> Collection[Any]:
    """Return the objects in a container or plain object, and the state of a generator."""
    if (state := generator_state(value)) is not None:
        return [state]
    parts: Collection[Any] = ()
    if isinstance(value, list | tuple | deque | set | frozenset):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif is_open(value):
        parts = attributes_of(value).values()
    return parts if len(parts) <= _MANY else ()


def generator_state(value: Any) -> Any:
    """Return a copy of the state of a generator of random numbers, and None for other objects."""
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, torch.Generator | np.random.RandomState):
        return value.get_state()
    is_random = isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)
    return value.getstate() if is_random else None


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has elements in memory, one after the other."""
    return not (is_lazy(tensor) or tensor.is_meta or tensor.is_nested) and tensor.layout is torch.strided


def is_open(value: Any) -> bool:
    """Return whether the attributes of an object are its state, which can be set.

    So it is for objects of a user's class, such as a callback that a module calls itself, and of a library's if they
    hold numbers and containers only: others may be connections, threads or registries.
    """
    kind = type(value)
    if isinstance(value, type) or kind.__module__ == "builtins" or kind in _SIMPLE:
        return False
    if {base.__module__.split(".")[0] for base in kind.__mro__ if base is not Callback} & _CLOSED:
        return False
    return not _is_of_library(kind) or all(isinstance(part, _SIMPLE) for part in attributes_of(value).values())


def _is_of_library(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)
    return is_installed or kind.__module__.split(".")[0] in sys.stdlib_module_names


def attributes_of(value: Any) -> dict[str, Any]:
    """Return a copy of the attributes of an object by name, also of those in `__slots__`."""
    slots = {name: getattr(value, name) for name in slots_of(value) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}


def slots_of(value: Any) -> list[str]:
    """Return the names of the attributes of an object for which its class has `__slots__`."""
    members = [member for base in type(value).__mro__ if "__slots__" in vars(base) for member in vars(base).values()]
    return [member.__name__ for member in members if isinstance(member, MemberDescriptorType)]
