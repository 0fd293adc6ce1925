"""torch's CUDA kernels of synchronized batch normalization, written with CPU operations from their definition.

The formulas are those of aten/src/ATen/native/cuda/Normalization.cuh in torch; its accessors require what is asserted.
"""

from typing import Any

import torch
from torch import Tensor

from src.utils.tensors import upcast_half

_LIBRARY = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Give the operators a CPU implementation in this process."""
    for kernel in (stats, gather_stats_with_counts, elemt, backward_reduce, backward_elemt):
        name = f"batch_norm_{kernel.__name__}"
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU"):
            _LIBRARY.impl(name, kernel, "CPU")


def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(upcast_half(input), _others(input), correction=0)
    return mean, (var + eps).rsqrt()


def gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
    n: Any,
) -> tuple[Tensor, Tensor]:
    assert n.dtype == running_mean.dtype == running_var.dtype == mean.dtype == upcast_half(input).dtype
    assert mean.shape == invstd.shape == (len(n), input.shape[1])
    weights = (n / n.sum())[:, None]
    center = (weights * mean).sum(0)
    var = (weights * (invstd**-2 - eps + (mean - center) ** 2)).sum(0)
    running_mean.mul_(1 - momentum).add_(center, alpha=momentum)
    running_var.mul_(1 - momentum).add_(var * n.sum() / (n.sum() - 1), alpha=momentum)
    return center, (var + eps).rsqrt()


def elemt(input: Tensor, weight: Any, bias: Any, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    _check_dense(input)
    normalized = (upcast_half(input) - _like(mean, input)) * _like(invstd, input)
    weighted = normalized if weight is None else normalized * _like(weight, input) + _like(bias, input)
    return weighted.to(input.dtype)


def backward_reduce(
    grad: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Any, *needs: bool
) -> tuple[Any, Any, Any, Any]:
    _check_dense(grad)
    assert grad.dtype == input.dtype
    sum_g = upcast_half(grad).sum(_others(input))
    sum_gx = (upcast_half(grad) * (input - _like(mean, input))).sum(_others(input))
    if weight is None:
        return sum_g, sum_gx, None, None
    return sum_g, sum_gx, (sum_gx * invstd).to(weight.dtype), sum_g.to(weight.dtype)


def backward_elemt(
    grad: Tensor, input: Tensor, mean: Tensor, invstd: Tensor, weight: Any, sum_g: Tensor, sum_gx: Tensor, n: Tensor
) -> Tensor:
    assert n.dtype == torch.int32
    assert weight is None or weight.dtype == mean.dtype
    projected = (input - _like(mean, input)) * _like(invstd**2 * sum_gx / n.sum(), input)
    scale = invstd if weight is None else invstd * weight
    return ((upcast_half(grad) - _like(sum_g / n.sum(), input) - projected) * _like(scale, input)).to(input.dtype)


def _others(input: Tensor) -> list[int]:
    """Return all dimensions but that of the channels."""
    return [dim for dim in range(input.ndim) if dim != 1]


def _like(values: Tensor, input: Tensor) -> Tensor:
    """Return the (channels,) values with the dimensions of the input."""
    return values.view(1, -1, *[1] * (input.ndim - 2))


def _check_dense(input: Tensor) -> None:
    formats = [torch.contiguous_format, torch.channels_last, torch.channels_last_3d]
    assert any(input.is_contiguous(memory_format=memory_format) for memory_format in formats)
