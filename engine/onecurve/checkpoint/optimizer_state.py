"""Optimizer state by parameter name: named, merged from all ranks, and sharded again."""

from itertools import chain, count, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from onecurve.errors import UserError

_IMPLEMENTATION = ("fused", "foreach")  # keys of a parameter group


def name_parameters(optimizer: Optimizer, module: nn.Module) -> None:
    """Add the names of the parameters in the module, and of several groups, to the optimizer, also to later groups.

    torch keeps `param_names` in state dicts (https://docs.pytorch.org/docs/stable/optim.html). It refuses a group
    without names beside named ones, so a callback such as BaseFinetuning could not add one.

    Raises:
        UserError: if a parameter is not in the module, or two groups have the same name.
    """
    _name_groups(optimizer, module)
    add = optimizer.add_param_group

    def add_and_name(group: dict[str, Any]) -> None:
        parameters = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        if set(parameters) in [set(one["params"]) for one in optimizer.param_groups]:
            return  # a resumed run begins its epoch again, and has the group from the checkpoint
        add(group | {"params": parameters, "param_names": None})
        _name_groups(optimizer, module)

    optimizer.add_param_group = add_and_name  # type: ignore[method-assign, assignment]


def _name_groups(optimizer: Optimizer, module: nn.Module) -> None:
    names = {parameter: name for name, parameter in module.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        if not names.keys() >= set(group["params"]):
            raise UserError(
                f"group {number} of {type(optimizer).__name__} has a parameter that is not in {type(module).__name__}: "
                "make its module an attribute"
            )
        group["param_names"] = [names[parameter] for parameter in group["params"]]
        if len(optimizer.param_groups) > 1:  # Lightning's LearningRateMonitor shows the name, also of a single group
            group.setdefault("name", f"group {number:02}")
    if len({group_name(group) for group in optimizer.param_groups}) < len(optimizer.param_groups):
        raise UserError(f"two parameter groups of {type(optimizer).__name__} have the same `name`: give each its own")


def group_name(group: dict[str, Any]) -> str:
    """Return the name of a parameter group, also of a single one that has none."""
    return str(group.get("name", "group 00"))


def restore_by_name(optimizer: Optimizer, module: nn.Module) -> None:
    """Let the optimizer load the state of any hardware, by the names of its parameters.

    torch's hooks for this are not called by an optimizer that wraps another one, such as timm's Lookahead.
    """
    load = optimizer.load_state_dict

    def load_by_name(saved: dict[str, Any]) -> None:
        is_of_torch = saved.keys() >= {"state", "param_groups"}  # not of each optimizer that wraps another one
        # A hook may load a state without names.
        if not is_of_torch or any("param_names" not in group for group in saved["param_groups"]):
            load(saved)
            return
        add_saved_groups(saved, optimizer, module)
        found = shard(saved, optimizer)
        moments = found["state"].copy()  # ZeroRedundancyOptimizer empties that of other ranks
        load(found)
        _keep_scalars(optimizer, moments)

    optimizer.load_state_dict = load_by_name  # type: ignore[method-assign, assignment]


def _keep_scalars(optimizer: Optimizer, saved: dict[int, Any]) -> None:
    """Give scalars, such as the product of momenta of NAdam, the type in which the optimizer computes them.

    torch converts all of a state to the type of the weights.
    """
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for index, moments in saved.items():
        state = optimizer.state.get(weights[index], {})
        for key in state.keys() & moments.keys():
            if isinstance(moments[key], Tensor) and moments[key].ndim == 0:
                state[key] = state[key].to(moments[key].dtype).copy_(moments[key])


def add_saved_groups(saved: dict[str, Any], optimizer: Optimizer, module: nn.Module) -> None:
    """Add the groups that the saved optimizer got while it trained; a stage of a pipeline adds its own parameters."""
    own, groups = dict(module.named_parameters()), optimizer.param_groups
    known = {name for group in groups for name in group["param_names"]}
    for group in saved["param_groups"]:
        parameters = [own[name] for name in group["param_names"] if name in own.keys() - known]
        if parameters and group_name(group) not in map(group_name, groups):
            optimizer.add_param_group({"params": parameters, "name": group_name(group)})


def merge(states: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    """Merge state dicts of optimizers, whose parameters and groups have names, into one.

    `names` are those of all parameters, in the order of the full network.
    """
    moments: dict[str, Any] = {}  # by parameter name
    groups: dict[str, dict[str, Any]] = {}  # by group name
    for state in states:
        moments |= {name: state["state"].get(index) for name, index in indices_by_name(state).items()}
        for group in state["param_groups"]:
            merged = groups.setdefault(group_name(group), group | {"param_names": []})
            merged["param_names"] += group["param_names"]
    numbers, merged_state = count(), {"param_groups": [groups[name] for name in sorted(groups)]}
    for group in merged_state["param_groups"]:
        group["param_names"].sort(key=names.index)
        group["params"] = list(islice(numbers, len(group["param_names"])))
    indices = indices_by_name(merged_state)
    return {"state": {index: moments[name] for name, index in indices.items() if moments[name]}} | merged_state


def shard(saved: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the part of a full optimizer state that belongs to `optimizer` on this rank.

    The result has only this rank's parameters, and shards of the tensors of sharded parameters. Parameters are matched
    by `param_names`, so their order does not matter. The implementation is that of `optimizer`: torch takes it from the
    checkpoint, which may be from another device.
    """
    saved_groups = {group_name(group): group for group in saved["param_groups"]}
    saved_indices = indices_by_name(saved)
    for group in optimizer.param_groups:
        if group_name(group) not in saved_groups or not saved_indices.keys() >= set(group["param_names"]):
            raise UserError(
                f"the optimizer in ckpt_path has other parameters in `{group_name(group)}`: set it as in that run"
            )
    state, param_groups, numbers = {}, [], count()
    for group in optimizer.param_groups:
        indices = list(islice(numbers, len(group["params"])))  # as in the state dict, which ZeRO refuses to give
        for parameter, name, index in zip(group["params"], group["param_names"], indices, strict=True):
            if moments := saved["state"].get(saved_indices[name]):
                state[index] = {key: shard_like(value, parameter) for key, value in moments.items()}
        own = {key: group[key] for key in ("param_names", *_IMPLEMENTATION) if key in group}
        param_groups.append(saved_groups[group_name(group)] | own | {"params": indices})
    return {"state": state, "param_groups": param_groups}


def indices_by_name(state: dict[str, Any]) -> dict[str, int]:
    """Return the index of each parameter in the state dict of an optimizer."""
    pairs = [zip(group["param_names"], group["params"], strict=True) for group in state["param_groups"]]
    return dict(chain.from_iterable(pairs))


def shard_like(value: Any, parameter: Tensor) -> Any:
    """Return this rank's shard of a tensor shaped like the sharded `parameter`, or any other value unchanged."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    value = value.to(device=parameter.device, memory_format=torch.contiguous_format)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
