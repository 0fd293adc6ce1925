"""Gathering of tensors and of other objects from all ranks.

Evaluation has every sample once, so ranks may hold different numbers of predictions, which torch gathers with a crash.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

all_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the older name is deprecated


@contextmanager
def collectives_replaced(strategy: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let a step call `function` in place of the collectives of a strategy, and of torch's for losses over all ranks.

    FSDP calls others.
    """
    with (
        mock.patch.multiple(strategy, reduce=function, all_gather=function),
        mock.patch.multiple(dist, all_gather=function, all_reduce=function),
    ):
        yield


def gather_objects(own: Any, group: Any = None) -> list[Any]:
    """Return the objects of all ranks of a group, each of which must call it; pickle copies them.

    The group is by default that of all ranks; one process alone has its own object.
    """
    if not dist.is_initialized():
        return [own]
    ranks: list[Any] = [None] * dist.get_world_size(group or dist.group.WORLD)
    dist.all_gather_object(ranks, own, group)
    return ranks


def names_that_differ(own: dict[str, Any]) -> list[str]:
    """Return the names of the values that differ between the ranks that have them. Every rank must call it."""
    ranks = gather_objects(own)
    names = sorted(set().union(*ranks))
    return [name for name in names if len({repr(rank[name]) for rank in ranks if name in rank}) > 1]  # NaN too


def group_of_samples(trainer: L.Trainer) -> Any:
    """Return the group of ranks that share the samples of an evaluation; None if all ranks do so.

    The ranks of one pipeline hold the same samples, and one of its replicas has others.
    """
    group = (trainer.distributed_sampler_kwargs or {}).get("group")
    return group if group is not None and dist.get_world_size(group) < dist.get_world_size() else None


def all_gather(strategy: ParallelStrategy, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
    """Gather as `LightningModule.all_gather`, also different numbers of rows. Every rank of the group must call it.

    The result is (ranks, rows, ...), or (1, rows of all ranks, ...) if their numbers differ. Outside of training the
    ranks are by default those that share the samples, so that each row occurs once.
    """
    trainer: Any = strategy.lightning_module.trainer
    if not trainer.training and (group is None or group is dist.group.WORLD):  # LightningModule.all_gather names it
        group = group_of_samples(trainer) or group
    may_differ = tensor.ndim > 0 and (not trainer.training or trainer.datamodule.bit_exact)
    counts = gather_objects(len(tensor), group) if may_differ else []
    if len(set(counts)) <= 1:
        return ParallelStrategy.all_gather(strategy, tensor, group, sync_grads)
    padding = tensor.new_zeros(max(counts) - len(tensor), *tensor.shape[1:])
    rows = ParallelStrategy.all_gather(strategy, torch.cat([tensor, padding]), group, sync_grads)
    return torch.cat([own[:count] for own, count in zip(rows, counts, strict=True)])[None]
