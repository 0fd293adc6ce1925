"""The layout of a global batch: which data-parallel rank holds which of its positions, in which micro-batch and group.

Position p of the global batch belongs to micro-batch p % M of the M micro-batches of a step, and to normalization group
p % G of G groups. Neither depends on the ranks, which take the positions of each micro-batch in turn, as many in a row
as their share. With `bit_exact`, virtual rank v holds the positions that rank v of a run on `virtual_ranks` processes
would hold.

`DataParallelInfo` is what a strategy says of the ranks, `BatchLayout` the positions that one rank has of one batch, and
`Division` gives the layout of a batch of any size.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onecurve.errors import UserError
from onecurve.network.compilation import device_constant


@dataclass(frozen=True)
class DataParallelInfo:
    """The position of this process among the data-parallel ranks, from the strategy's `distributed_sampler_kwargs`.

    Attributes:
        dp_size: number of data-parallel ranks: all ranks under DDP and FSDP; the ranks of one pipeline count as one.
        dp_rank: index of this data-parallel rank.
        num_microbatches: number of micro-batches into which the strategy itself splits a batch, as a pipeline does;
            gradient accumulation does not count.
        shares: relative numbers of samples of the ranks; None for equal ones.
        in_turn: whether the ranks take virtual ranks in turn, and not consecutive ones.
    """

    dp_size: int = 1
    dp_rank: int = 0
    num_microbatches: int = 1
    shares: tuple[int, ...] | None = None
    in_turn: bool = False

    @property
    def all_shares(self) -> tuple[int, ...]:
        """Relative number of samples of each rank."""
        return self.shares or (1,) * self.dp_size

    def virtual_ranks(self, count: int, rank: int | None = None) -> range:
        """Return which of `count` virtual ranks a rank (this one by default) computes one by one, by its share."""
        rank = self.dp_rank if rank is None else rank
        if self.in_turn:
            return range(rank, count, self.dp_size)
        shares = self.all_shares
        first, last = (count * sum(shares[:number]) // sum(shares) for number in (rank, rank + 1))
        return range(first, last)


@dataclass(frozen=True)
class BatchLayout:
    """The positions of a global batch that a data-parallel rank holds.

    Args:
        batch_size: samples of the global batch.
        parallel: the strategy's division of the data.
        accumulate: parts into which accumulation divides a step; the strategy may split each of them into
            `num_microbatches` micro-batches.
        virtual_ranks: groups of the global batch over which batch normalization takes its statistics. If the
            micro-batches cannot hold whole groups, which nothing else needs, each counts as one group.
        has_pairs: whether a sample must be on the same rank as its partner, half a global batch further on.

    Raises:
        UserError: if the batch does not divide over the micro-batches, a rank would have no sample, or the shares are
            not one positive integer per rank.
    """

    batch_size: int
    parallel: DataParallelInfo = DataParallelInfo()
    accumulate: int = 1
    virtual_ranks: int = 1
    has_pairs: bool = False

    def __post_init__(self) -> None:
        self._check_divides()
        shares, size = self.parallel.all_shares, self.parallel.dp_size
        if len(shares) != size or any(not isinstance(share, int) or share < 1 for share in shares):
            raise UserError(
                f"strategy.shares={list(shares)}: give a positive integer for each of the {size} data-parallel ranks"
            )
        if int(self.counts.sum(1).min()) == 0:
            raise UserError(
                f"data.batch_size={self.batch_size} leaves one of {size} data-parallel ranks without a sample in each "
                f"of {self.micro_batches} micro-batches: raise it, or change trainer.devices or strategy.shares"
            )

    def _check_divides(self) -> None:
        batch, parts = self.batch_size, self.micro_batches * (2 if self.has_pairs else 1)
        if batch % parts == 0:
            return
        divisors = [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        if self.has_pairs:
            divisors.append("pairs of samples, which data.augment.mixup and cutmix mix")
        raise UserError(
            f"data.batch_size={batch} does not divide over {' of '.join(divisors)}: set "
            f"data.batch_size={_multiples(batch, parts)}, or change trainer.accumulate_grad_batches or the number of "
            "micro-batches"
        )

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per optimizer step."""
        return self.accumulate * self.parallel.num_microbatches

    @property
    def has_whole_groups(self) -> bool:
        """Whether each micro-batch holds whole normalization groups."""
        return self.virtual_ranks % self.micro_batches == 0

    @property
    def is_uneven(self) -> bool:
        """Whether the ranks hold different numbers of samples."""
        samples = self.counts.sum(1)
        return bool((samples != samples[0]).any())

    @property
    def samples_per_batch(self) -> int:
        """Number of samples of one of the `accumulate` parts of this rank, of `num_microbatches` micro-batches each."""
        return len(self._slots) * self.parallel.num_microbatches

    @property
    def mean_samples_per_batch(self) -> float:
        """Mean of `samples_per_batch` over the ranks."""
        return self.batch_size / (self.accumulate * self.parallel.dp_size)

    @cached_property
    def positions(self) -> Tensor:
        """Positions of this rank in the global batch, (accumulate, samples_per_batch).

        Row i of a batch belongs to micro-batch i % num_microbatches. The samples of a micro-batch are ordered by group.
        """
        # Row p of micro-batch m is position p * micro_batches + m of the global batch.
        numbers = np.arange(self.micro_batches).reshape(self.accumulate, 1, -1)  # (accumulate, 1, micro-batches)
        positions = self._slots[:, None] * self.micro_batches + numbers  # (accumulate, samples, micro-batches)
        return torch.from_numpy(positions.reshape(self.accumulate, -1))

    @cached_property
    def partners(self) -> Tensor:
        """Row of each row's partner in a batch of this rank, (samples_per_batch,), if it has pairs."""
        position = self.positions[0].numpy()
        row_of = np.zeros(self.batch_size, dtype=np.int64)
        row_of[position] = np.arange(len(position))
        return torch.from_numpy(row_of[(position + self.batch_size // 2) % self.batch_size])

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Number of samples of each rank in each group of a micro-batch, (dp_size, groups)."""
        number_of = self._ranks * self._groups_per_micro_batch + self._groups
        shape = (self.parallel.dp_size, self._groups_per_micro_batch)
        return np.bincount(number_of, minlength=shape[0] * shape[1]).reshape(shape)

    @property
    def _groups_per_micro_batch(self) -> int:
        return self.virtual_ranks // self.micro_batches if self.has_whole_groups else 1

    @cached_property
    def _ranks(self) -> NDArray[np.int64]:
        """Rank of each position in a micro-batch, (positions,)."""
        size = self.batch_size // self.micro_batches
        in_turn = np.repeat(np.arange(self.parallel.dp_size), self.parallel.all_shares)
        distinct = size // 2 if self.has_pairs else size
        return in_turn[np.arange(size) % distinct % len(in_turn)]

    @cached_property
    def _groups(self) -> NDArray[np.int64]:
        """Group of each position in a micro-batch, (positions,)."""
        return np.arange(len(self._ranks)) % self._groups_per_micro_batch

    @cached_property
    def _slots(self) -> NDArray[np.int64]:
        """Positions of this rank in a micro-batch, (n,), ordered by group."""
        own = np.flatnonzero(self._ranks == self.parallel.dp_rank)
        return own[np.argsort(self._groups[own], kind="stable")]


def _multiples(batch_size: int, divisor: int) -> str:
    """Return the sizes nearest to a batch size that a number divides."""
    below = batch_size // divisor * divisor
    return f"{below} or {below + divisor}" if below else f"{divisor}"


@dataclass(frozen=True)
class Division:
    """The division of the global batches of training into the parts that each rank computes.

    With `bit_exact` a rank computes its virtual ranks one by one. Other arguments are those of a `BatchLayout`.
    """

    parallel: DataParallelInfo = DataParallelInfo()
    accumulate: int = 1
    virtual_ranks: int = 4
    bit_exact: bool = False
    has_pairs: bool = False

    def layouts(self, batch_size: int) -> list[BatchLayout]:
        """Return the layout that this rank has of a global batch.

        With `bit_exact` there is one for each own virtual rank: that of a rank of a run on `virtual_ranks` processes.
        """
        if not self.bit_exact:
            return [BatchLayout(batch_size, self.parallel, self.accumulate, self.virtual_ranks, self.has_pairs)]
        self.check_virtual_ranks()
        samples = self.virtual_ranks * (2 if self.has_pairs else 1)
        if batch_size % samples:
            raise UserError(
                f"bit_exact=true: {samples} must divide data.batch_size={batch_size}, for virtual_ranks="
                f"{self.virtual_ranks}: set the batch size {_multiples(batch_size, samples)}, or other virtual_ranks"
            )
        ranks = [DataParallelInfo(self.virtual_ranks, number) for number in self.own_virtual_ranks]
        return [BatchLayout(batch_size, rank, has_pairs=self.has_pairs) for rank in ranks]

    def check_virtual_ranks(self) -> None:
        """Check that each rank has one, also of an evaluation alone."""
        count, parallel = self.virtual_ranks, self.parallel
        if count & (count - 1):
            raise UserError(f"bit_exact=true: virtual_ranks={count} must be a power of two")
        if not all(parallel.virtual_ranks(count, rank) for rank in range(parallel.dp_size)):
            raise UserError(
                f"bit_exact=true: virtual_ranks={count} leaves one of {parallel.dp_size} data-parallel ranks without "
                "one: use fewer trainer.devices, or raise virtual_ranks, which is another experiment"
            )

    def positions(self, batch_size: int) -> Tensor:
        """Return the positions of this rank in a global batch, (parts, n)."""
        return torch.cat([layout.positions for layout in self.layouts(batch_size)])

    def weight(self, batch_size: int) -> float:
        """Return the number of samples of a part of this rank, relative to the mean over all ranks."""
        if self.bit_exact:
            return 1.0
        layout = self.layouts(batch_size)[0]
        return layout.samples_per_batch / layout.mean_samples_per_batch

    @property
    def own_virtual_ranks(self) -> range:
        """The virtual ranks that this rank computes one by one."""
        return self.parallel.virtual_ranks(self.virtual_ranks)

    @property
    def num_parts(self) -> int:
        """Number of parts of a global batch that this rank computes; `bit_exact` is refused with accumulation."""
        return len(self.own_virtual_ranks) if self.bit_exact else self.accumulate

    @property
    def sharing(self) -> int:
        """Number of parts of all ranks that share a global batch."""
        return self.parallel.dp_size * self.accumulate

    @property
    def is_divided(self) -> bool:
        """Whether a global batch has parts of several ranks or micro-batches."""
        return not self.bit_exact and self.sharing > 1


@device_constant
def partners(layout: BatchLayout, device: torch.device) -> Tensor:
    return layout.partners.to(device)
