"""An optimiser's state by the names of its parameters: put together of what ranks hold, and dealt out to them again."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def merge(parts: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """One state of several, each of other parameters, in the order that `names` gives to all."""
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
    """Of a whole state, what `optimizer` on this rank holds: parameters, and of each tensor a shard or all.

    Tensors find their parameters by `param_names`, so the order of either's does not matter.
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
    """A sharded tensor put together, by all ranks of its mesh; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard_like(value: Any, parameter: Tensor) -> Any:
    """Of a tensor that is shaped like a sharded parameter, this rank's shard; else the value itself.

    For one without memory, memory of that size, to be read into.
    """
    if not isinstance(value, Tensor):
        return value
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return torch.empty_like(value, device="cpu") if value.is_meta else value
    if value.is_meta:
        return torch.empty_like(parameter, dtype=value.dtype)
    value = value.to(device=parameter.device, memory_format=torch.contiguous_format)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
