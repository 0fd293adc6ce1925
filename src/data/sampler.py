"""Which samples each process trains on, and evaluates: the same global batches for any number of processes."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from src.data.hashing import permutation
from src.data.parallel import DataParallelInfo

_ALONE = DataParallelInfo(dp_size=1, dp_rank=0, num_microbatches=1)


class TrainingBatches(Sampler[Tensor]):
    """One data-parallel rank's micro-batches of an epoch: a pure function of (seed, epoch, start).

    The order of the whole epoch is a permutation fixed by (seed, epoch). Global batch k is its k-th slice. It is dealt
    like cards: one sample to each micro-batch of the first rank, then of the second, and so on around. So micro-batch j
    holds the same samples for any number of ranks, and samples half a global batch apart, which mixup pairs, come to
    lie in the same one. The remainder that does not fill a global batch is left out, in each epoch another.

    Of the micro-batches of a rank, `num_microbatches` at a time lie in one batch that is yielded, every such-th sample
    belonging to the same: a pipeline takes them apart again.

    `epoch` and `start` (the samples of that epoch already trained) are read when the first batch is asked for.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        accumulate: int = 1,
        seed: int = 0,
        parallel: DataParallelInfo = _ALONE,
        steps: int | None = None,
    ) -> None:
        self.num_samples, self.batch_size, self.accumulate = num_samples, batch_size, accumulate
        self.seed, self.parallel = seed, parallel
        self.steps = num_samples // batch_size if steps is None else steps  # of an epoch
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this as each epoch begins; a resumed epoch keeps its start."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        return self.steps * self.accumulate

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.table()

    def table(self) -> Tensor:
        """What is left of the epoch: one micro-batch of this rank per row."""
        order = permutation(self.num_samples, self.seed, self.epoch)[self.start : self.steps * self.batch_size]
        dp_size, dp_rank, num_microbatches = self.parallel
        rounds = self.batch_size // (dp_size * self.accumulate * num_microbatches)
        dealt = order.view(-1, rounds, dp_size, self.accumulate, num_microbatches)
        own = dealt[:, :, dp_rank]  # (steps, rounds, accumulate, num_microbatches)
        return own.transpose(1, 2).reshape(-1, rounds * num_microbatches)


class EvaluationBatches(Sampler[Tensor]):
    """One rank's share of a split, each sample once over all ranks, in batches of one shape padded with -1."""

    def __init__(self, num_samples: int, per_device: int, dp_size: int = 1, dp_rank: int = 0) -> None:
        self.num_samples, self.per_device, self.dp_size, self.dp_rank = num_samples, per_device, dp_size, dp_rank

    def __len__(self) -> int:
        return -(-self.num_samples // (self.per_device * self.dp_size))

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.table()

    def table(self) -> Tensor:
        """One batch of this rank per row."""
        positions = torch.arange(len(self) * self.per_device) * self.dp_size + self.dp_rank
        return torch.where(positions < self.num_samples, positions, -1).view(-1, self.per_device)


Batches = TrainingBatches | EvaluationBatches
