"""Checkpoints that travel: whole tensors by the names of their parameters, whatever a rank holds in memory."""

from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


class PortableStrategy(ModelParallelStrategy):
    """Restores a checkpoint before the network is taken apart, and its optimiser's state, by name, after.

    So a checkpoint is that of a single process, whichever strategy wrote it, and any reads it.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(save_distributed_checkpoint=False, **kwargs)

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def setup(self, trainer: L.Trainer) -> None:
        Strategy.setup(self, trainer)  # Lightning's own wants a module that parallelises itself

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own, saved = self.lightning_module.state_dict(), checkpoint["state_dict"]
        state = {name: _part(saved[name], tensor) for name, tensor in own.items()}
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for saved, optimizer in zip(checkpoint["optimizer_states"], self.optimizers, strict=True):
            scatter(saved, optimizer)


def collect(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank of the group has (null: of all), on the first; nothing elsewhere. Every one must take part."""
    parts: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(own, parts, group_dst=0, group=group)
    return parts or []


def gather(optimizer: Optimizer) -> dict[str, Any]:
    """The state as a single process would have it, its shards put together. Every rank must take part."""
    state = optimizer.state_dict()
    state["state"] = {
        number: {key: whole(value) for key, value in moments.items()} for number, moments in state["state"].items()
    }
    return state


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


def scatter(saved: dict[str, Any], optimizer: Optimizer) -> None:
    """Load a whole state into `optimizer`, of each tensor the part that this rank holds.

    Tensors find their parameters by `param_names`, so the order of either's does not matter.
    """
    numbers = {name: number for group in saved["param_groups"] for name, number in _numbered(group)}
    state, kept = {}, []
    own = optimizer.state_dict()["param_groups"]
    for group, described in zip(optimizer.param_groups, own, strict=True):
        for parameter, (name, number) in zip(group["params"], _numbered(described), strict=True):
            moments = saved["state"].get(numbers[name], {})
            state[number] = {key: _part(value, parameter) for key, value in moments.items()}
        theirs = next(group for group in saved["param_groups"] if described["param_names"][0] in group["param_names"])
        kept.append({**theirs, "params": described["params"], "param_names": described["param_names"]})
    optimizer.load_state_dict({"state": {key: value for key, value in state.items() if value}, "param_groups": kept})


def _numbered(group: dict[str, Any]) -> list[tuple[str, int]]:
    return list(zip(group["param_names"], group["params"], strict=True))


def whole(value: Any) -> Any:
    """A sharded tensor put together, by all ranks of its mesh; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part(value: Any, parameter: Tensor) -> Any:
    """Of a tensor that is shaped like a sharded parameter, this rank's shard; else the value itself."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    value = value.to(device=parameter.device, memory_format=torch.contiguous_format)
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
