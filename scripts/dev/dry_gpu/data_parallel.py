"""Stubs of torch.nn.DataParallel: its copies between GPUs are in the CUDA build of torch only."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import comm


def install_data_parallel() -> None:
    """Replace the copies, and the threads: a new thread has no `FakeTensorMode`."""
    module: Any = comm
    module.broadcast_coalesced, module.reduce_add_coalesced = _broadcast, _reduce_add
    module.scatter, module.gather = _scatter, _gather
    nn.DataParallel.parallel_apply = _apply_in_turn  # type: ignore[method-assign]


def _broadcast(tensors: Sequence[Tensor], devices: Sequence[int], *_: Any) -> list[list[Tensor]]:
    return [[tensor.to(f"cuda:{device}") for tensor in tensors] for device in devices]


def _reduce_add(inputs: Sequence[Sequence[Tensor]], destination: int, *_: Any) -> list[Tensor]:
    device = f"cuda:{destination}"
    return [torch.stack([tensor.to(device) for tensor in tensors]).sum(0) for tensors in zip(*inputs, strict=True)]


def _scatter(tensor: Tensor, target_gpus: Sequence[int], _: Any = None, dim: int = 0, *__: Any) -> tuple[Tensor, ...]:
    parts = zip(tensor.chunk(len(target_gpus), dim), target_gpus, strict=True)
    return tuple(part.to(f"cuda:{gpu}") for part, gpu in parts)


def _gather(tensors: Sequence[Tensor], dim: int, target_device: int) -> Tensor:
    return torch.cat([tensor.to(f"cuda:{target_device}") for tensor in tensors], dim)


def _apply_in_turn(self: Any, replicas: Sequence[Any], inputs: Sequence[Any], kwargs: Any) -> list[Any]:
    calls = zip(replicas, inputs, kwargs, strict=True)
    return [replica(*args, **options) for replica, args, options in calls]
