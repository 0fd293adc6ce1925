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
    """Return the Euclidean norm of all elements: each square is an integer of 60 bits, and their sum is exact.

    The integers are relative to the largest square. On MPS, which has no float64, it is torch's norm.

    Args:
        tensors: all those that this process has; of a sharded one, it counts its shard.
        device: their device.
        group: processes that hold other elements, each of which must call it; None if this process holds all.

    Returns:
        The norm in float64.
    """
    shards = [to_local(tensor) for tensor in tensors]
    own = [(torch.view_as_real(shard) if shard.is_complex() else shard).flatten() for shard in shards]
    if device.type == "mps":
        return nn.utils.get_total_norm(own)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    largest = torch.stack(
        [zero, *(torch.linalg.vector_norm(tensor, torch.inf).double() for tensor in own if tensor.numel())]
    ).max()
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)  # a maximum over processes may lose a NaN
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    exponent = torch.frexp(largest).exponent  # no element is above 2**exponent
    scale = torch.ldexp(zero + 1, _BITS // 2 - exponent)
    halves = torch.zeros(2, dtype=torch.int64, device=device)
    for chunk in (chunk for tensor in own for chunk in tensor.split(_CHUNK)):
        squares = (chunk.double() * scale).square_()
        upper = squares.trunc()
        lower = squares.sub_(upper).mul_(2.0**_BITS).trunc_()
        halves += torch.stack([upper.sum(), lower.sum()]).long()
    if group is not None:
        dist.all_reduce(halves, group=group)
    upper, lower = halves.double() * 2.0**-_BITS
    norm = torch.ldexp((upper + lower * 2.0**-_BITS).sqrt(), exponent)
    return norm.where(largest.isfinite(), largest)
