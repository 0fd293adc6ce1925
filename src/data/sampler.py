"""Samplers of each process for training and evaluation: the global batches are the same for any number of processes."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from src.data.hashing import permutation
from src.data.parallel import SINGLE_PROCESS, DataParallelInfo
from src.utils.errors import UserError


class TrainingBatches(Sampler[Tensor]):
    """Micro-batches of one data-parallel rank in an epoch, as a pure function of (seed, epoch, start).

    The order of the epoch is a permutation fixed by (seed, epoch), and global batch k is its k-th slice. Its samples
    are assigned round-robin: one to each micro-batch of the first rank, then of the second rank, and so on. So
    micro-batch j, over all ranks, contains the same samples for any number of ranks. Samples that are half a global
    batch apart, which Mixup pairs, are in the same micro-batch. Each epoch drops the samples at its end that do not
    fill a global batch; they differ from epoch to epoch.

    A yielded batch contains `num_microbatches` micro-batches of a pipeline, which splits them again: sample i belongs
    to micro-batch i % num_microbatches.

    `epoch` and `start` (the samples of that epoch already trained) are read when the first batch is requested.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        accumulate: int = 1,
        seed: int = 0,
        parallel: DataParallelInfo = SINGLE_PROCESS,
        steps: int | None = None,
    ) -> None:
        self.num_samples, self.batch_size, self.accumulate = num_samples, batch_size, accumulate
        self.seed, self.parallel = seed, parallel
        self.steps = num_samples // batch_size if steps is None else steps  # per epoch
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch at its first sample; a resumed epoch keeps its start. Lightning calls this method."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def __len__(self) -> int:
        return self.steps * self.accumulate

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.table()

    def table(self) -> Tensor:
        """Return the rest of the epoch as positions in the split, (batches, n): one batch of this rank per row."""
        order = permutation(self.num_samples, self.seed, self.epoch)[self.start : self.steps * self.batch_size]
        dp_size, dp_rank, num_microbatches = self.parallel
        rounds = self.batch_size // (dp_size * self.accumulate * num_microbatches)
        global_batches = order.view(-1, rounds, dp_size, self.accumulate, num_microbatches)
        own = global_batches[:, :, dp_rank]  # (steps, rounds, accumulate, num_microbatches)
        return own.transpose(1, 2).reshape(-1, rounds * num_microbatches)


class EvaluationBatches(Sampler[Tensor]):
    """Evaluation batches of one rank: each sample occurs once over all ranks, and -1 pads the last row of a batch.

    There are as few batches as `per_device` allows, of equal size. The samples are assigned round-robin: one to each
    rank's first batch, then to its second batch, and so on. So a batch has at most one row of padding, and a batch of
    two rows or more has a sample.
    """

    def __init__(self, num_samples: int, per_device: int, dp_size: int = 1, dp_rank: int = 0) -> None:
        self.num_samples, self.dp_size, self.dp_rank = num_samples, dp_size, dp_rank
        self.batches = -(-num_samples // (per_device * dp_size))
        self.rows = -(-num_samples // max(1, self.batches * dp_size))

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.table()

    def table(self) -> Tensor:
        """Return positions in the split, (batches, n): one batch of this rank per row."""
        slots = torch.arange(self.batches)[:, None] + torch.arange(self.rows) * self.batches
        positions = slots * self.dp_size + self.dp_rank
        return torch.where(positions < self.num_samples, positions, -1)

    def check_no_rank_is_empty(self, split: str) -> None:
        """Check that each batch of each rank has a sample.

        Raises:
            UserError: if one is all padding.
        """
        if self.rows == 1 and self.num_samples < self.batches * self.dp_size:
            raise UserError(
                f"the {self.num_samples} images of `{split}` leave a batch of one of {self.dp_size} processes empty: "
                f"evaluate more images, set trainer.limit_{split}_batches=0, or use fewer trainer.devices"
            )


Batches = TrainingBatches | EvaluationBatches
