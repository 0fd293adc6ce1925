"""The groups of batch normalization that a rank holds, and the ranks with which it shares them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from src.engine.determinism.layout import BatchLayout


@dataclass(frozen=True)
class RankGroups:
    """The normalization groups of a micro-batch that this rank, or a rank with which it shares a group, holds.

    Attributes:
        counts: number of samples of each group on each of these ranks, as (ranks, groups).
        own: this rank's row of `counts`.
        sharing: process group of these ranks; None if this rank holds its groups alone.
        data_parallel: process group of all data-parallel ranks; None if there is one.
        weight: weight of this rank's running statistics in their mean over the data-parallel ranks.
        micro_batches: number of micro-batches per optimizer step.
    """

    counts: tuple[tuple[int, ...], ...]
    own: int
    sharing: Any
    data_parallel: Any
    weight: float
    micro_batches: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each group on this rank."""
        return self.counts[self.own]

    @property
    def totals(self) -> tuple[int, ...]:
        """Number of samples of each group."""
        return tuple(map(sum, zip(*self.counts, strict=True)))


def rank_groups(layout: BatchLayout, data_parallel: Any) -> RankGroups:
    """Return the groups of this rank. Every data-parallel rank must call it.

    Args:
        layout: the layout of the global batch.
        data_parallel: process group of the data-parallel ranks; None if there is one.
    """
    holds, rank = layout.counts > 0, layout.parallel.dp_rank
    ranks = _ranks_sharing(holds, rank)
    counts = layout.counts[ranks][:, holds[ranks].any(0)]
    sharing = data_parallel
    if len(ranks) < len(holds):
        members = [dist.get_process_group_ranks(data_parallel)[number] for number in ranks]
        sharing = dist.new_group(members, use_local_synchronization=True) if len(ranks) > 1 else None
    weight = counts.shape[1] / holds.shape[1] / len(ranks)
    rows = tuple(map(tuple, counts.tolist()))
    return RankGroups(rows, ranks.index(rank), sharing, data_parallel, weight, layout.micro_batches)


def _ranks_sharing(holds: NDArray[np.bool_], rank: int) -> list[int]:
    """Return the ranks that share a group with a rank, or with a rank that does, from (ranks, groups) bools."""
    found, more = np.zeros(len(holds), dtype=bool), np.arange(len(holds)) == rank
    while not np.array_equal(more, found):
        found, more = more, holds[:, holds[more].any(0)].any(1)
    return list(np.flatnonzero(found).tolist())
