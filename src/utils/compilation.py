"""torch.compile for functions that are not networks: they keep the values of the eager functions."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_P = ParamSpec("_P")
_T = TypeVar("_T")
# Without these options Inductor keeps intermediate values of half precision in float32, contracts a product and a sum
# into one rounding, and divides approximately.
_EAGER_ROUNDING = ("emulate_precision_casts", "eager_numerics.division_rounding")


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled by torch.compile, once per process.

    The result is no attribute of an object, because the objects of a run are pickled for spawned ranks, and compiled
    functions cannot be. The first call compiles, and so does the first one with other shapes, types or Python values.
    """
    known = torch._inductor.list_options()  # of this version of torch
    return torch.compile(function, dynamic=False, options={name: True for name in _EAGER_ROUNDING if name in known})


def should_compile(choice: bool | str, tensor: Tensor) -> bool:
    """Return whether to compile a function of this tensor, if the user's choice is not false.

    On a CPU it does not pay, and sharded tensors communicate.
    """
    return bool(choice) and tensor.is_cuda and not isinstance(tensor, DTensor)


def device_constant(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Cache the tensors that a function of constants returns: to create them on a GPU would need a synchronization.

    Within a compiled function Inductor creates them, when it compiles.
    """
    cached = functools.cache(function)

    @functools.wraps(function)
    def constant(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return cached(*args, **kwargs)  # type: ignore[arg-type]  # the arguments are hashable

    return constant
