"""Gathering of tensors and of other objects from all ranks.

Evaluation has every sample once, so ranks may hold different numbers of predictions, which torch gathers with a crash.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor

all_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the older name is deprecated


def gather_objects(own: Any) -> list[Any]:
    """Return the objects of all ranks, which pickle copies; one process alone has its own. Every rank must call it."""
    if not dist.is_initialized():
        return [own]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks


def all_gather(strategy: ParallelStrategy, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
    """Gather as `LightningModule.all_gather`, also different numbers of rows. Every rank of the group must call it.

    The result is (ranks, rows, ...), or (1, rows of all ranks, ...) if their numbers differ.
    """
    trainer: Any = strategy.lightning_module.trainer
    may_differ = tensor.ndim > 0 and (not trainer.training or trainer.datamodule.bit_exact)
    counts = [len(tensor)] * dist.get_world_size(group) if may_differ else []
    if may_differ:
        dist.all_gather_object(counts, len(tensor), group)
    if len(set(counts)) <= 1:
        return ParallelStrategy.all_gather(strategy, tensor, group, sync_grads)
    padding = tensor.new_zeros(max(counts) - len(tensor), *tensor.shape[1:])
    rows = ParallelStrategy.all_gather(strategy, torch.cat([tensor, padding]), group, sync_grads)
    return torch.cat([own[:count] for own, count in zip(rows, counts, strict=True)])[None]
