"""Optimiser state that travels: whole tensors by the names of their parameters, whatever a rank holds in memory."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def gather(optimizer: Optimizer) -> dict[str, Any]:
    """The state as a single process would have it, its shards put together. Every rank must take part."""
    state = optimizer.state_dict()
    state["state"] = {
        number: {key: _whole(value) for key, value in moments.items()} for number, moments in state["state"].items()
    }
    return state


def scatter(saved: dict[str, Any], optimizer: Optimizer) -> None:
    """Load a whole state into `optimizer`, of each tensor the part that this rank holds.

    Tensors find their parameters by `param_names`, so the order of either's does not matter.
    """
    numbers = {name: number for group in saved["param_groups"] for name, number in _numbered(group)}
    state = {}
    own = optimizer.state_dict()["param_groups"]
    for group, described in zip(optimizer.param_groups, own, strict=True):
        for parameter, (name, number) in zip(group["params"], _numbered(described), strict=True):
            moments = saved["state"].get(numbers[name], {})
            state[number] = {key: _part(value, parameter) for key, value in moments.items()}
    kept = [
        {**theirs, "params": mine["params"], "param_names": mine["param_names"]}
        for theirs, mine in zip(saved["param_groups"], own, strict=True)
    ]
    optimizer.load_state_dict({"state": {key: value for key, value in state.items() if value}, "param_groups": kept})


def _numbered(group: dict[str, Any]) -> list[tuple[str, int]]:
    return list(zip(group["param_names"], group["params"], strict=True))


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part(value: Any, parameter: Tensor) -> Any:
    """Of a tensor that is shaped like a sharded parameter, this rank's shard; else the value itself."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    value = value.to(device=parameter.device, memory_format=torch.contiguous_format)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
