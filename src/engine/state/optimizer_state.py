"""Optimizer state by parameter name: named, merged from all ranks, and sharded again."""

from itertools import count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from src.engine.utils.errors import UserError

_IMPLEMENTATION = ("fused", "foreach")  # keys of a parameter group


def name_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    """Add the names of the parameters in the module, and of the groups, to the optimizer's state, where missing.

    torch keeps `param_names` in state dicts (https://docs.pytorch.org/docs/stable/optim.html).

    Raises:
        UserError: if a parameter is not in the module, or two groups have one name: no checkpoint could restore them.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer_name = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        if not names.keys() >= set(group["params"]):
            raise UserError(
                f"group {number} of {optimizer_name} has a parameter that is not in {type(module).__name__}: make its "
                "module an attribute"
            )
        group.setdefault("param_names", [names[parameter] for parameter in group["params"]])
        group.setdefault("name", f"group {number:02}")
    if len({group["name"] for group in optimizer.param_groups}) < len(optimizer.param_groups):
        raise UserError(f"two parameter groups of {optimizer_name} have the same `name`: give each its own, or none")


def merge(states: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Merge the optimizer states of different parameters into one.

    Args:
        states: state dicts of optimizers with named parameters and groups.
        names: names of all parameters, in the order of the full network.
    """
    if not states:
        return {}
    moments: dict[str, dict[str, Any]] = {}  # by parameter name
    groups: dict[str, dict[str, Any]] = {}  # by group name
    for state in states:
        for group in state["param_groups"]:
            merged_group = groups.setdefault(group["name"], {**group, "param_names": []})
            merged_group["param_names"] += group["param_names"]
            for name, index in _indices_by_name(group).items():
                moments[name] = state["state"].get(index, {})
    return _number_parameters([group for _, group in sorted(groups.items())], moments, names)


def _number_parameters(
    groups: list[dict[str, Any]], moments: dict[str, dict[str, Any]], names: list[str]
) -> dict[str, Any]:
    """Return the state dict of an optimizer over the groups, with parameters in the order of `names`."""
    state: dict[int, dict[str, Any]] = {}
    param_groups = []
    next_index = 0
    for group in groups:
        ordered = sorted(group["param_names"], key=names.index)
        indices = list(range(next_index, next_index + len(ordered)))
        next_index += len(ordered)
        param_groups.append(group | {"params": indices, "param_names": ordered})
        for index, name in zip(indices, ordered, strict=True):
            if moments[name]:
                state[index] = moments[name]
    return {"state": state, "param_groups": param_groups}


def shard(saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the part of a full optimizer state that belongs to `optimizer` on this rank.

    The result has only this rank's parameters, and shards of the tensors of sharded parameters. Parameters are matched
    by `param_names`, so their order does not matter. The implementation is that of `optimizer`, also in `saved`: torch
    takes it from the checkpoint, which may be from another device, and ZeroRedundancyOptimizer reads `saved` again.

    Raises:
        UserError: if the state lacks a parameter or a group.
    """
    saved_indices: dict[str, int] = {}
    saved_groups = {group["name"]: group for group in saved["param_groups"]}
    for group in saved_groups.values():
        saved_indices |= _indices_by_name(group)
    for group in optimizer.param_groups:
        if group["name"] not in saved_groups or not saved_indices.keys() >= set(group["param_names"]):
            raise UserError(
                f"the optimizer in ckpt_path has other parameters in `{group['name']}`: set it as in that run"
            )
    state, param_groups, numbers = {}, [], count()
    for group in optimizer.param_groups:
        indices = list(islice(numbers, len(group["params"])))  # as in the state dict, which ZeRO refuses to give
        for parameter, name, index in zip(group["params"], group["param_names"], indices, strict=True):
            if moments := saved["state"].get(saved_indices[name]):
                state[index] = {key: shard_like(value, parameter) for key, value in moments.items()}
        saved_group = saved_groups[group["name"]]
        saved_group |= {key: group[key] for key in _IMPLEMENTATION if key in group}
        param_groups.append(saved_group | {"params": indices, "param_names": group["param_names"]})
    return {"state": state, "param_groups": param_groups}


def _indices_by_name(group: dict[str, Any]) -> dict[str, int]:
    """Return the index of each parameter of a group in the state dict."""
    return dict(zip(group["param_names"], group["params"], strict=True))


def shard_like(value: Any, parameter: Tensor) -> Any:
    """Return this rank's shard of a tensor shaped like the sharded `parameter`, or any other value unchanged.

    For a meta tensor, return uninitialized memory of the same size, for values that are read from a checkpoint later.
    """
    if not isinstance(value, Tensor):
        return value
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return torch.empty_like(value, device="cpu") if value.is_meta else value
    if value.is_meta:
        return torch.empty_like(parameter, dtype=value.dtype)
    value = value.to(device=parameter.device, memory_format=torch.contiguous_format)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
