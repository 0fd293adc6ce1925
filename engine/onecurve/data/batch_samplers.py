"""Samplers of each process, and limits of steps and samples: the same global batches for any number of processes.

Lightning counts its limits in batches of a rank, whose size depends on the number of ranks.

Here a sample has a position in its global batch, a place in the order of its epoch, and an index in the dataset, which
`loader.py` and datasets call its position there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat

import torch
from torch import Tensor
from torch.utils.data import Sampler

from onecurve.data.layout import DataParallelInfo
from onecurve.errors import UserError


class EpochStart:
    """Where a loader begins: with step `start` of an epoch."""

    epoch = start = 0

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch at its first step; a resumed epoch keeps its start. Lightning calls this method."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0


@dataclass(eq=False)
class TrainingBatches(EpochStart, Sampler[Tensor]):
    """Batches of one data-parallel rank in an epoch, as a pure function of (seed, epoch, start).

    Global batch k is the k-th slice of the epoch's order, of which this rank has some positions. Each epoch
    drops the samples at its end that do not fill a global batch; if it is shuffled, they differ from epoch to epoch.

    `epoch` and `start` are read when the first batch is requested.

    Args:
        batch_size: samples of a global batch.
        positions: positions of this rank in a global batch, (batches, n).
        steps: optimizer steps per epoch.
        order: maps an epoch to its order, (n,) indices in the dataset.
        weight: samples of a batch of this rank, relative to their mean over the ranks.
    """

    batch_size: int
    positions: Tensor
    steps: int
    order: Callable[[int], Tensor]
    weight: float = 1.0

    def __len__(self) -> int:
        return self.steps * len(self.positions)

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.table()

    def places(self) -> Tensor:
        """Return the rest of the epoch as places in its order, (batches, n): one batch of this rank per row."""
        start = min(self.start, self.steps)  # another loader may go on after this one has ended
        places = torch.arange(start * self.batch_size, self.steps * self.batch_size).view(-1, self.batch_size)
        return places[:, self.positions].flatten(0, 1)

    def table(self) -> Tensor:
        """Return the indices in the dataset at these places."""
        return self.order(self.epoch)[self.places()]

    def weights(self) -> Iterator[float]:
        """Return the weight of each batch."""
        return repeat(self.weight)


@dataclass(eq=False)
class GivenBatches(EpochStart, Sampler[Tensor]):
    """Batches of one data-parallel rank in an epoch, of those that a user's `batch_sampler` gives.

    A given batch, of any size, is a global batch of which this rank has some positions, or the batch of a virtual rank.

    Args:
        given: maps an epoch to its batches, indices in the dataset.
        positions: maps the size of a global batch to the positions of this rank in it, (batches, n).
        sharing: number of batches of all ranks that share a global batch.
        steps: optimizer steps per epoch.
        own: the virtual ranks of this rank, if they are computed one by one.
        batches_per_step: how many given batches a step has, if each is that of a virtual rank.
    """

    given: Callable[[int], Sequence[Tensor]]
    positions: Callable[[int], Tensor]
    sharing: int
    steps: int
    own: Sequence[int] | None = None
    batches_per_step: int = 1

    def __len__(self) -> int:
        parts = self.positions(len(self.given(self.epoch)[0])) if self.own is None else self.own
        return self.steps * len(parts)

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.table()

    def places(self) -> list[Tensor]:
        """Return the rest of the epoch as places in its order: one batch of this rank each."""
        ends = torch.tensor([len(batch) for batch in self.given(self.epoch)]).cumsum(0).tolist()
        rows = [torch.arange(first, end) for first, end in pairwise([0, *ends])]
        steps = range(self.start, self.steps)
        if self.own is not None:
            return [rows[step * self.batches_per_step + rank] for step in steps for rank in self.own]
        return [rows[step][part] for step in steps for part in self.positions(len(rows[step]))]

    def table(self) -> list[Tensor]:
        """Return the indices in the dataset at these places."""
        order = torch.cat(list(self.given(self.epoch)))
        return [order[places] for places in self.places()]

    def weights(self) -> Iterator[float]:
        """Yield the samples of each batch, relative to their mean over the ranks; 1 for those of virtual ranks."""
        if self.own is not None:
            yield from repeat(1.0)
        for batch in self.given(self.epoch)[self.start : self.steps]:
            for part in self.positions(len(batch)):
                yield len(part) * self.sharing / len(batch)


class EvaluationBatches(Sampler[Tensor]):
    """Evaluation batches of one rank: each sample occurs once over all ranks, and -1 pads the last rows of a batch.

    There are as few batches as `batch_size` samples over all ranks allow, of equal size but for padding. The samples
    are assigned in rounds, in each of which a rank gets as many as its share. A batch has successive rounds, so a rank
    alone keeps the order of the samples. If the rounds do not fill all batches, the first batches have one round
    less. So padding is at most one round of a batch, and a batch of two rounds or more has a sample.

    Args:
        order: the samples, as indices in the dataset.
        batch_size: number of samples of a batch over all ranks.
        parallel: the ranks, and which of them this one is.
        ranks: yield the batches of these ranks, of equal shares, in turn; None for those of this rank.
    """

    def __init__(
        self, order: Tensor, batch_size: int, parallel: DataParallelInfo, ranks: Sequence[int] | None = None
    ) -> None:
        shares, num_samples = parallel.shares or [1] * parallel.dp_size, len(order)
        self.order, self.num_samples = order, num_samples
        self.samples_per_round, self.share = sum(shares), shares[parallel.dp_rank]
        ranks = [parallel.dp_rank] if ranks is None else ranks
        self.firsts = torch.tensor([sum(shares[:rank]) for rank in ranks])  # of these ranks in a round
        self.batches = -(-num_samples // (max(1, batch_size // self.samples_per_round) * self.samples_per_round))
        self.rounds = -(-num_samples // max(1, self.batches * self.samples_per_round))

    def __len__(self) -> int:
        return self.batches * len(self.firsts)

    def __iter__(self) -> Iterator[Tensor]:
        yield from self.table()

    def weights(self) -> Iterator[float]:
        """Return the weight of each batch: an evaluation counts the samples."""
        return repeat(1.0)

    def places(self) -> Tensor:
        """Return places in the order, (batches, n), and -1 for padding: one batch of a rank per row."""
        # The first batches have a round less, so a batch begins earlier by the number of those before it.
        shorter = self.batches * self.rounds - -(-self.num_samples // self.samples_per_round)
        batch = torch.arange(self.batches)[:, None]
        first = batch * self.rounds - batch.clamp(max=shorter)
        rounds = first + torch.arange(self.rounds)  # (batches, rounds)
        rounds[:shorter, self.rounds - 1 :] = self.num_samples  # beyond the samples
        own = self.firsts[:, None] + torch.arange(self.share)  # (ranks, samples of a round)
        positions = (rounds[:, None, :, None] * self.samples_per_round + own[:, None]).flatten(2).flatten(0, 1)
        return torch.where(positions < self.num_samples, positions, -1)

    def table(self) -> Tensor:
        """Return the indices in the dataset at these places, and -1 for padding."""
        return torch.cat([self.order, torch.tensor([-1])])[self.places()]

    def check_no_rank_is_empty(self, split: str, parts: int | None = None) -> None:
        """Check that each batch of each rank has a sample.

        Args:
            split: the name of the samples, for the error message.
            parts: evaluation batches in a batch of the loader, if its `batch_size` is that of these batches.
        """
        if self.rounds == 1 and self.num_samples < self.batches * self.samples_per_round:
            # With two rounds or more, the batches share the rounds so that each has a full one.
            is_enough = parts and self.num_samples > self.samples_per_round
            way = f"set batch_size={2 * self.samples_per_round * (parts or 1)} or more in its loader, "
            raise UserError(
                f"the {self.num_samples} samples of `{split}` leave a batch of a process or virtual rank empty: "
                f"{way if is_enough else ''}evaluate more of them, set trainer.limit_{split}_batches=0, or use fewer "
                "trainer.devices"
            )


Batches = TrainingBatches | GivenBatches | EvaluationBatches


def apply_limit(option: str, limit: int | float | None, available: int, unit: int = 1) -> int:
    """Return how many of the `available` steps or samples a limit leaves.

    Args:
        option: the name of the option, for error messages.
        limit: an integer number of units, a fraction of `available` from 0 to 1, or None for no limit.
        available: the number of steps or samples.
        unit: the number of steps or samples in one unit of an integer limit.

    Raises:
        UserError: if the limit is no such number, or leaves nothing although it is above 0.
    """
    if limit is None:
        return available
    is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
    is_fraction = isinstance(limit, float) and 0 <= limit <= 1
    if not (is_count or is_fraction):
        raise UserError(f"{option}={limit}: set a number of batches of data.batch_size, or a fraction such as 0.5")
    count = min(available, int(limit) * unit) if is_count else int(available * limit)
    if limit and available and not count:
        raise UserError(f"{option}={limit} leaves nothing of {available}: set a larger value")
    return count


def limit_without_length(option: str, limit: int | float | None) -> int | None:
    """Return a limit of the batches of a stream that does not tell its length; None for no limit.

    Raises:
        UserError: if it is a fraction, or no limit at all.
    """
    if isinstance(limit, float) and limit < 1:
        raise UserError(f"{option}={limit}, but a stream has no length: set a number of batches")
    apply_limit(option, limit, available=1)
    return limit if isinstance(limit, int) else None


def total_steps(max_epochs: int | None, max_steps: int, steps_per_epoch: int) -> int:
    """Return the number of optimizer steps of a run: that of Lightning's limits which ends it first."""
    limits = [max_steps] if max_steps != -1 else []
    if max_epochs is not None and max_epochs != -1:
        limits.append(max_epochs * steps_per_epoch)
    return min(limits, default=1000 * steps_per_epoch)
