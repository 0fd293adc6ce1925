"""Conversions of tensors: between sharded and plain ones, and from half precision."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def upcast_half(tensor: Tensor) -> Tensor:
    """Return a float32 copy of a tensor in half precision (bfloat16 or float16), or any other tensor unchanged."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def to_full_tensor(value: Any) -> Any:
    """Gather a sharded tensor on all ranks of its mesh (a collective); return anything else unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor, or any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
