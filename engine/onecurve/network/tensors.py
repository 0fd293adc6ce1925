"""Conversions of tensors: sharded and plain ones, half precision, vectors; module versions of state dicts."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
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


def to_vector(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of tensors of one type, one tensor after the other."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def copy_from_vector(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Undo `to_vector`, in place; torch's `vector_to_parameters` would give the tensors other memory."""
    for tensor, values in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))


def with_versions(tensors: Mapping[str, Any], source: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the tensors as a state dict with the module versions of `source`, if it has them.

    `load_state_dict` passes the version to the module, which migrates the weights of an older one, or of none. A plain
    copy of a state dict loses the attribute, so that a module would migrate its present weights.
    """
    result: OrderedDict[str, Any] = OrderedDict()
    vars(result).update(getattr(source, "__dict__", {}))
    result.update(tensors)
    return result


def memory_format_of(tensor: Tensor) -> torch.memory_format:
    """Return channels last for images that are stored so, and otherwise the contiguous format."""
    is_last = tensor.ndim == 4 and not tensor.is_contiguous()
    is_last = is_last and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format
