"""torch.compile: for networks, and for other functions, which keep the values of the eager functions."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from onecurve.errors import UserError, suggest
from onecurve.patches.torch import compiler_options

_P = ParamSpec("_P")
_T = TypeVar("_T")
# Without these options Inductor keeps intermediate values of half precision in float32, contracts a product and a sum
# into one rounding, and divides approximately.
_EAGER_ROUNDING = ("emulate_precision_casts", "eager_numerics.division_rounding")

GRAPH_MODES = ("reduce-overhead", "max-autotune")  # with CUDA graphs
_UNTUNED = {"max-autotune": "reduce-overhead", "max-autotune-no-cudagraphs": "default"}
_MODES = ("default", "max-autotune-no-cudagraphs", *GRAPH_MODES)


def check_compile_mode(option: str, choice: bool | str) -> None:
    """Check the value of an option that compiles: a bool, or the name of a mode of torch.compile."""
    if isinstance(choice, str) and choice not in _MODES:
        raise UserError(f"{option}={choice}: give true, false or a mode: {suggest(choice, _MODES)}")


def compile_blocks(net: nn.Module, mode: str | None) -> None:
    """Compile the forward pass of a network as one graph; the names of its parameters do not change.

    If torch is to be deterministic, as with `bit_exact`, no process chooses kernels by their times.
    """
    if mode and torch.are_deterministic_algorithms_enabled():
        mode = _UNTUNED.get(mode, mode)
    # Dynamo skips the file of nn.Sequential, so `net.compile()` would compile its layers one by one. The blocks become
    # a part of the graph of the network, unless FSDP's hooks break it at each block.
    for part in (net, *net.children()):
        part.forward = torch.compile(part.forward, mode=mode)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled by torch.compile, once per process.

    The result is no attribute of an object, because the objects of a run are pickled for spawned ranks, and compiled
    functions cannot be. The first call compiles, and so does the first one with other shapes, types or Python values.
    """
    known = compiler_options()  # of this version of torch
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
    def cached_unless_compiled(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return cached(*args, **kwargs)  # type: ignore[arg-type]  # the arguments are hashable

    return cached_unless_compiled


@device_constant
def constant(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of some values, which may be nested tuples."""
    return torch.tensor(values, dtype=dtype, device=device)
