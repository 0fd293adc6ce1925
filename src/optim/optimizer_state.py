"""Optimizer state by parameter name: merged from all ranks, and sharded again."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def merge(parts: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Merge states of different parameters into one, in the order of `names`."""
    if not parts:
        return {}
    moments: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for part in parts:
        for group in part["param_groups"]:
            known = groups.setdefault(group["name"], {**group, "param_names": []})
            known["param_names"] += group["param_names"]
            moments |= {name: part["state"].get(number, {}) for name, number in _numbered(group)}
    merged: dict[str, Any] = {"state": {}, "param_groups": []}
    for _, group in sorted(groups.items()):
        ordered = sorted(group["param_names"], key=names.index)
        first = sum(len(before["params"]) for before in merged["param_groups"])
        numbers = range(first, first + len(ordered))
        merged["param_groups"].append(group | {"params": list(numbers), "param_names": ordered})
        merged["state"] |= {
            number: moments[name] for number, name in zip(numbers, ordered, strict=True) if moments[name]
        }
    return merged


def shard(saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the part of a full optimizer state that belongs to `optimizer` on this rank.

    Only its own parameters are kept, and the tensors of sharded parameters are sharded. Parameters are matched by
    `param_names`, so their order does not matter.
    """
    numbers = {name: number for group in saved["param_groups"] for name, number in _numbered(group)}
    state, kept = {}, []
    own = optimizer.state_dict()["param_groups"]
    for group, described in zip(optimizer.param_groups, own, strict=True):
        for parameter, (name, number) in zip(group["params"], _numbered(described), strict=True):
            moments = saved["state"].get(numbers[name], {})
            state[number] = {key: shard_like(value, parameter) for key, value in moments.items()}
        theirs = next(group for group in saved["param_groups"] if described["param_names"][0] in group["param_names"])
        kept.append({**theirs, "params": described["params"], "param_names": described["param_names"]})
    return {"state": {key: value for key, value in state.items() if value}, "param_groups": kept}


def _numbered(group: dict[str, Any]) -> list[tuple[str, int]]:
    return list(zip(group["param_names"], group["params"], strict=True))


def to_full_tensor(value: Any) -> Any:
    """Gather a sharded tensor on all ranks of its mesh (a collective); return anything else unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard_like(value: Any, parameter: Tensor) -> Any:
    """Return this rank's shard of a tensor shaped like the sharded `parameter`, or any other value unchanged.

    For a meta tensor, return uninitialized memory of the same size, into which a checkpoint is read.
    """
    if not isinstance(value, Tensor):
        return value
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return torch.empty_like(value, device="cpu") if value.is_meta else value
    if value.is_meta:
        return torch.empty_like(parameter, dtype=value.dtype)
    value = value.to(device=parameter.device, memory_format=torch.contiguous_format)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
