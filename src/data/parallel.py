"""The division of a global batch among data-parallel ranks and micro-batches, as a strategy defines it."""

from typing import NamedTuple

import lightning as L


class DataParallelInfo(NamedTuple):
    """The position of this process among the data-parallel ranks.

    Attributes:
        dp_size: number of data-parallel ranks: all ranks under DDP and FSDP; the ranks of one pipeline count as one.
        dp_rank: index of this data-parallel rank.
        num_microbatches: number of micro-batches into which the strategy itself splits a batch, as a pipeline does;
            gradient accumulation does not count.
    """

    dp_size: int
    dp_rank: int
    num_microbatches: int


SINGLE_PROCESS = DataParallelInfo(dp_size=1, dp_rank=0, num_microbatches=1)


def data_parallel_info(trainer: L.Trainer | None) -> DataParallelInfo:
    """Return the data-parallel size and rank and the number of micro-batches of the trainer's strategy."""
    if trainer is None:
        return SINGLE_PROCESS
    kwargs = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    return DataParallelInfo(kwargs["num_replicas"], kwargs["rank"], getattr(trainer.strategy, "num_microbatches", 1))
