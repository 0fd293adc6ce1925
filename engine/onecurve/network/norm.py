"""A norm whose bits depend neither on the order of the elements nor on how processes divide them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onecurve.network.tensors import to_local

_BITS = 30  # of each half of a square: 2**32 squares add up below 2**63
_CHUNK = 2**18  # elements at once, whose integers add up exactly in float64


def order_free_norm(tensors: Sequence[Tensor], device: torch.device, group: Any = None) -> Tensor:
    """Return the Euclidean norm of all elements, in float64: the sum of the squares, integers of 60 bits, is exact.

    The integers are relative to the largest square. On MPS, which has no float64, it is torch's norm. Of a sharded
    tensor each process of the group counts its shard, and must call it; without a group this process holds all.
    """
    shards = [to_local(tensor) for tensor in tensors]
    own = [(torch.view_as_real(shard) if shard.is_complex() else shard).flatten() for shard in shards]
    if device.type == "mps":
        return nn.utils.get_total_norm(own)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    largest = _largest([zero, *own])
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    exponent = torch.frexp(largest).exponent  # no element is above 2**exponent
    halves = _sum_squares(own, scale=torch.ldexp(zero + 1, _BITS // 2 - exponent))
    if group is not None:
        dist.all_reduce(halves, group=group)
    upper, lower = halves.double() * 2.0**-_BITS
    norm = torch.ldexp((upper + lower * 2.0**-_BITS).sqrt(), exponent)
    return norm.where(largest.isfinite(), largest)


def _largest(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value, infinity for a NaN, which a maximum over processes may lose."""
    values = [torch.linalg.vector_norm(tensor, torch.inf).double() for tensor in tensors if tensor.numel()]
    return torch.stack(values).max().nan_to_num(nan=torch.inf, posinf=torch.inf)


def _sum_squares(tensors: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Return the sum of the squares of scaled elements, as the integers of its upper and lower half, (2,)."""
    halves = torch.zeros(2, dtype=torch.int64, device=scale.device)
    for chunk in (chunk for tensor in tensors for chunk in tensor.split(_CHUNK)):
        squares = (chunk.double() * scale).square_()
        upper = squares.trunc()
        lower = squares.sub_(upper).mul_(2.0**_BITS).trunc_()
        halves += torch.stack([upper.sum(), lower.sum()]).long()
    return halves
