"""How a strategy divides a global batch among ranks and micro-batches."""

from typing import NamedTuple

import lightning as L


class DataParallelInfo(NamedTuple):
    """The place of this process among the data-parallel ranks.

    Attributes:
        dp_size: data-parallel ranks: all ranks under DDP and FSDP; the ranks of one pipeline count as one.
        dp_rank: which of them this is.
        num_microbatches: into how many the strategy itself takes a batch apart, as a pipeline does; accumulation apart.
    """

    dp_size: int
    dp_rank: int
    num_microbatches: int


def data_parallel_info(trainer: L.Trainer) -> DataParallelInfo:
    """Return what the trainer's strategy says of itself."""
    kwargs = trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    return DataParallelInfo(kwargs["num_replicas"], kwargs["rank"], getattr(trainer.strategy, "num_microbatches", 1))
