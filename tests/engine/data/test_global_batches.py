"""Global batches do not depend on the number of processes; evaluation counts each sample once."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from onecurve.data.layout import BatchLayout, DataParallelInfo, Division
from onecurve.data.rank_batches import EvaluationBatches, TrainingBatches
from onecurve.errors import UserError
from onecurve.random.hashing import permutation

COUNT, BATCH = 103, 24
SHARES = (1, 2, 3, 2) * 256  # of 1,024 ranks


def layouts(
    dp_size: int, batch: int = BATCH, shares: tuple[int, ...] | None = None, **options: Any
) -> list[BatchLayout]:
    return [BatchLayout(batch, DataParallelInfo(dp_size, rank, shares=shares), **options) for rank in range(dp_size)]


def batches(seed: int, epoch: int) -> tuple[torch.Tensor, ...]:
    return permutation(COUNT, seed, epoch).split(BATCH)


def epoch(dp_size: int, number: int = 0, seed: int = 0) -> list[list[int]]:
    """The samples of each batch, over all ranks."""
    divisions = [Division(layout.parallel, virtual_ranks=1) for layout in layouts(dp_size)]
    ranks = [TrainingBatches(partial(batches, seed), division, COUNT // BATCH) for division in divisions]
    for rank in ranks:
        rank.epoch = number
    return [sorted(torch.cat(parts).tolist()) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [(None, [43, 43, 42]), ((3, 1), [96, 32]), ((5, 2, 1), [80, 32, 16]), ((2, 2), [64, 64])],
)
def test_shares_divide_the_batch(shares: tuple[int, ...] | None, expected: list[int]) -> None:
    ranks = layouts(len(expected), 128, shares)
    assert [layout.samples_per_batch for layout in ranks] == expected
    assert ranks[0].is_uneven is (len(set(expected)) > 1)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (126, {"accumulate": 4}, "data.batch_size=126 does not divide over 4 micro-batches: .*=124 or 128"),
        (3, {"accumulate": 4}, "set data.batch_size=4, or"),
        (33, {"has_pairs": True}, "over pairs of samples.*mixup.*=32 or 34"),
        (8, {"accumulate": 8}, "data.batch_size=8 leaves one of 2 data-parallel ranks without a sample"),
        (8, {"shares": (9, 1)}, "leaves one of 2 data-parallel ranks without a sample"),
        (8, {"shares": (1, 1, 1)}, r"strategy.shares=\[1, 1, 1\]: give a positive integer for each of the 2"),
        (8, {"shares": (1, 0)}, r"strategy.shares=\[1, 0\]"),
        (8, {"shares": (1.5, 1)}, r"strategy.shares=\[1.5, 1\]"),
    ],
)
def test_refuses_batches_that_do_not_divide(batch: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        layouts(2, batch, **options)


def test_epoch_takes_each_sample_at_most_once_and_drops_the_remainder() -> None:
    seen = [index for batch in epoch(2) for index in batch]
    assert len(seen) == len(set(seen)) == COUNT // BATCH * BATCH
    assert len(TrainingBatches(partial(batches, 0), Division(accumulate=2), 3)) == 6


@pytest.mark.parametrize(("batch", "shares", "sizes"), [(4096, None, {4}), (4100, None, {4, 5}), (4100, SHARES, None)])
def test_1024_ranks_divide_the_epochs_order(batch: int, shares: tuple[int, ...] | None, sizes: set[int] | None) -> None:
    """No two ranks hold the same position of a global batch; put in their positions, all shares are that order."""
    ranks = layouts(1024, batch, shares)
    order = permutation(2 * batch + 7, 0, 0)
    divisions = [Division(layout.parallel, virtual_ranks=1) for layout in ranks]
    tables = [torch.stack([*TrainingBatches(lambda epoch: order.split(batch), own, 2)]) for own in divisions]
    positions = torch.cat([layout.positions[0] for layout in ranks])
    assert positions.sort().values.tolist() == list(range(batch))
    assert torch.cat(tables, dim=1)[:, positions.argsort()].flatten().equal(order[: 2 * batch])
    assert not sizes or {table.shape[1] for table in tables} == sizes


def test_order_is_fixed_by_seed_and_epoch() -> None:
    assert epoch(1) == epoch(1)
    assert epoch(1) != epoch(1, number=1)
    assert epoch(1) != epoch(1, seed=1)


@pytest.mark.parametrize("shares", [(1,), (1, 1, 1, 1), (3, 1), (5, 2, 1)])
@pytest.mark.parametrize("count", [0, 1, 33, 90])
def test_evaluation_counts_every_sample_once_by_shares(count: int, shares: tuple[int, ...]) -> None:
    """Each rank has as many batches, as few as possible, of as many rows as its share, with one round of padding."""
    size, rounds = sum(shares), 32 // sum(shares)
    places = [DataParallelInfo(len(shares), rank, shares=shares) for rank in range(len(shares))]
    ranks = [EvaluationBatches(torch.arange(count), 32, place) for place in places]
    tables = [torch.stack([*rank]) if count else torch.empty(0, 0) for rank in ranks]
    indices = torch.cat([table.flatten() for table in tables])
    assert sorted(indices[indices >= 0].tolist()) == list(range(count))
    assert {len(table) for table in tables} == {math.ceil(count / rounds / size)}
    for table, share in zip(tables, shares, strict=True):
        assert table.shape[1] == tables[-1].shape[1] // shares[-1] * share <= rounds * share
        assert not count or table.lt(0).sum(1).max() <= share


@pytest.mark.parametrize(("count", "batch", "dp_size"), [(3, 32, 4), (5, 2, 2)])
def test_refuses_an_evaluation_in_which_a_rank_has_no_sample(count: int, batch: int, dp_size: int) -> None:
    EvaluationBatches(torch.arange(count + 1), batch, DataParallelInfo(dp_size)).check_no_rank_is_empty("val")
    with pytest.raises(
        UserError, match=f"the {count} samples of `val` leave a batch of a process or virtual rank empty"
    ):
        EvaluationBatches(torch.arange(count), batch, DataParallelInfo(dp_size)).check_no_rank_is_empty("val")


@pytest.mark.parametrize(("ranks", "unit"), [(1, 8), (2, 8), (3, 8), (5, 8), (3, 2)])
def test_a_sanity_check_has_the_samples_of_whole_batches_and_each_rank_has_one(ranks: int, unit: int) -> None:
    samples = []
    for rank in range(ranks):
        one = EvaluationBatches(torch.arange(60), unit, DataParallelInfo(ranks, rank), unit=unit)
        one.checked = 2
        batches = [batch[batch >= 0].tolist() for batch in one]
        assert all(batches)
        samples += [index for batch in batches for index in batch]
    rounded = 0 if unit >= 2 * ranks else -2 * unit % ranks  # a batch has one sample of each rank
    assert sorted(samples) == [*range(2 * unit + rounded)]
