"""The batches of one rank in an epoch or an evaluation: a part of the same global batches on any number of processes.

A sample has a position in its global batch, a place in the order of its epoch (`orders.py`), and an index in the
dataset.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, repeat

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Sampler

from onecurve.data.layout import DataParallelInfo, Division
from onecurve.errors import UserError
from onecurve.random.seeding import EVALUATION


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

    Each step takes a global batch, of which this rank has some positions; or a batch of each virtual rank.

    `epoch` and `start` are read when the first batch is requested.

    Args:
        batches: maps an epoch to its batches in their order, as indices in the dataset; a tensor if they have one size.
        division: the division of each of them among the ranks.
        steps: optimizer steps per epoch.
        per_step: how many of the batches a step takes: several only of a `batch_sampler` with `bit_exact`.
        own: which of them this rank takes.
    """

    batches: Callable[[int], Tensor | Sequence[Tensor]]
    division: Division
    steps: int
    per_step: int = 1
    own: Sequence[int] = (0,)

    @property
    def parts_per_step(self) -> int:
        """Number of batches of this rank in an optimizer step."""
        return len(self.own) * self.division.num_parts

    def __len__(self) -> int:
        return self.steps * self.parts_per_step

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the rest of the epoch as indices in the dataset: one batch of this rank each."""
        return (batch[part] for _, batch, part in self._parts())

    def places(self) -> Iterator[Tensor]:
        """Yield the places of these batches in the order of the epoch."""
        return (first + part for first, _, part in self._parts())

    def weights(self) -> Iterator[float]:
        """Yield the samples of each batch, relative to their mean over the ranks."""
        weight = cache(self.division.weight)  # of each size
        return (weight(len(batch)) for _, batch, _ in self._parts())

    def _parts(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the place of a batch in the epoch, the batch, and positions of this rank in it."""
        batches, positions = self.batches(self.epoch), cache(self.division.positions)  # of each size
        firsts = [0, *accumulate(map(len, batches))]
        for step in range(self.start, self.steps):
            for own in self.own:
                number = step * self.per_step + own
                for part in positions(len(batches[number])):
                    yield firsts[number], batches[number], part


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
        unit: number of samples of a batch of the user's loader.

    Attributes:
        checked: batches of the user's loader whose samples are yielded, those of a sanity check.
    """

    epoch, parts_per_step, checked = EVALUATION, 1, math.inf

    def __init__(
        self,
        order: Tensor,
        batch_size: int,
        parallel: DataParallelInfo,
        ranks: Sequence[int] | None = None,
        unit: int = 1,
    ) -> None:
        self._division, self._unit = (batch_size, parallel, ranks), unit
        shares = parallel.all_shares
        self.order, self.num_samples = order, len(order)
        self.samples_per_round, self.share = sum(shares), shares[parallel.dp_rank]
        self.firsts = [sum(shares[:rank]) for rank in ranks or [parallel.dp_rank]]  # of these ranks in a round
        self.total_rounds = -(-len(order) // self.samples_per_round)
        self.count = -(-self.total_rounds // max(1, batch_size // self.samples_per_round))
        self.rounds = -(-self.total_rounds // max(1, self.count))

    def __len__(self) -> int:
        checked = self._first_checked()
        return checked.count * len(checked.firsts)

    def __iter__(self) -> Iterator[Tensor]:
        """Yield indices in the dataset, and -1 for padding: one batch of a rank each."""
        padded = torch.cat([self.order, torch.tensor([-1])])
        return (padded[places] for places in self.places())

    def weights(self) -> Iterator[float]:
        """Return the weight of each batch: an evaluation counts the samples."""
        return repeat(1.0)

    def places(self) -> list[Tensor]:
        """Return the places of these batches in the order, and -1 for padding."""
        if self.checked < math.inf:
            return self._first_checked().places()
        missing = self.total_rounds * self.samples_per_round - self.num_samples
        places = F.pad(torch.arange(self.num_samples), (0, missing), value=-1)
        rounds = places.view(self.total_rounds, self.samples_per_round)
        shorter = self.count * self.rounds - self.total_rounds
        sizes = [self.rounds - 1] * shorter + [self.rounds] * (self.count - shorter)
        own = [batch[:, first : first + self.share] for batch in rounds.split(sizes) for first in self.firsts]
        return [F.pad(rows, (0, 0, 0, self.rounds - len(rows)), value=-1).flatten() for rows in own]

    def _first_checked(self) -> "EvaluationBatches":
        """Return these batches, or those of the first samples if only some are checked."""
        if self.checked == math.inf:
            return self
        samples = int(self.checked) * self._unit
        if self.rounds == 1:  # or a rank would have no sample of the last one
            samples += -samples % self.samples_per_round
        return EvaluationBatches(self.order[:samples], *self._division)

    def check_no_rank_is_empty(self, split: str, parts: int | None = None) -> None:
        """Check that each batch of each rank has a sample; `parts` of them are one of the loader, if known."""
        if self.rounds == 1 and self.num_samples < self.count * self.samples_per_round:
            # With two rounds or more, the batches share the rounds so that each has a full one.
            is_enough = parts and self.num_samples > self.samples_per_round
            way = f"set batch_size={2 * self.samples_per_round * (parts or 1)} or more in its loader, "
            raise UserError(
                f"the {self.num_samples} samples of `{split}` leave a batch of a process or virtual rank empty: "
                f"{way if is_enough else ''}evaluate more of them, set trainer.limit_{split}_batches=0, or use fewer "
                "trainer.devices"
            )
