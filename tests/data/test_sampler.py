"""Global batches do not depend on the number of processes; evaluation counts each sample once."""

import math

import pytest
import torch
from src.data.parallel import DataParallelInfo

from src.data.sampler import EvaluationBatches, TrainingBatches
from src.utils.errors import UserError

COUNT, BATCH = 103, 24


def epoch(dp_size: int, accumulate: int = 1, start: int = 0, number: int = 0, seed: int = 0) -> list[list[int]]:
    """The samples of each micro-batch, over all ranks."""
    ranks = [
        TrainingBatches(COUNT, BATCH, accumulate, seed, DataParallelInfo(dp_size, rank, 1)) for rank in range(dp_size)
    ]
    for rank in ranks:
        rank.epoch, rank.start = number, start
    return [sorted(torch.cat(batches).tolist()) for batches in zip(*ranks, strict=True)]


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("dp_size", [2, 4])
def test_global_batches_do_not_depend_on_the_world_size(dp_size: int, accumulate: int) -> None:
    assert epoch(dp_size, accumulate) == epoch(1, accumulate)


def test_accumulation_splits_the_same_global_batches() -> None:
    halves = epoch(1, accumulate=2)
    assert [sorted(a + b) for a, b in zip(halves[::2], halves[1::2], strict=True)] == epoch(1)


def test_epoch_takes_each_sample_at_most_once_and_drops_the_remainder() -> None:
    seen = [index for batch in epoch(2) for index in batch]
    assert len(seen) == len(set(seen)) == COUNT // BATCH * BATCH
    assert len(TrainingBatches(COUNT, BATCH)) == len(epoch(1))


def test_order_is_fixed_by_seed_and_epoch() -> None:
    assert epoch(1) == epoch(1)
    assert epoch(1) != epoch(1, number=1)
    assert epoch(1) != epoch(1, seed=1)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_resumes_at_a_sample(dp_size: int) -> None:
    assert epoch(dp_size, start=2 * BATCH) == epoch(1)[2:]


def test_next_epoch_starts_at_its_beginning() -> None:
    batches = TrainingBatches(COUNT, BATCH)
    batches.epoch, batches.start = 3, 2 * BATCH
    batches.set_epoch(3)
    assert batches.start == 2 * BATCH
    batches.set_epoch(4)
    assert batches.start == 0


@pytest.mark.parametrize("dp_size", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 16, 33, 90, 103])
def test_evaluation_counts_every_sample_once_in_equal_parts(count: int, dp_size: int) -> None:
    """Each rank has as many batches of as many rows, as few as possible, with at most one row of padding each."""
    per_device = 8
    ranks = [EvaluationBatches(count, per_device, dp_size, rank).table() for rank in range(dp_size)]
    indices = torch.cat(ranks).flatten()
    assert sorted(indices[indices >= 0].tolist()) == list(range(count))
    assert len({rank.shape for rank in ranks}) == 1
    batches, rows = ranks[0].shape
    assert batches == math.ceil(count / per_device / dp_size)
    assert rows <= per_device
    padding = torch.cat(ranks).lt(0).sum(1)
    assert not count or padding.max() <= 1
    assert rows < 2 or padding.max() < rows


@pytest.mark.parametrize(("count", "per_device", "dp_size"), [(3, 8, 4), (5, 1, 2)])
def test_refuses_an_evaluation_in_which_a_rank_has_no_sample(count: int, per_device: int, dp_size: int) -> None:
    EvaluationBatches(count + 1, per_device, dp_size).check_no_rank_is_empty("val")
    with pytest.raises(UserError, match=f"the {count} images of `val` leave a batch of one of {dp_size} processes"):
        EvaluationBatches(count, per_device, dp_size).check_no_rank_is_empty("val")
