"""The batches of each rank in training and evaluation, by values that were worked out by hand."""

from collections.abc import Iterable
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from onecurve.data.layout import DataParallelInfo, Division
from onecurve.data.rank_batches import EpochStart, EvaluationBatches, TrainingBatches
from onecurve.errors import UserError

GIVEN = [torch.tensor([5, 6, 7, 8]), torch.tensor([9, 0]), torch.tensor([1, 2, 3])]  # of one epoch


EVENS = Division(DataParallelInfo(2), virtual_ranks=1)  # the first of two ranks has positions 0, 2, and so on


def in_fours(epoch: int) -> list[Tensor]:
    """Return the samples of an epoch: 100 to 107 in the first, 200 to 207 in the next."""
    return [torch.arange(first, first + 4) + 100 * (epoch + 1) for first in (0, 4)]


def division(positions: list[list[int]], weight: float = 1.0) -> Any:
    """Return a division in which a rank has these positions."""
    rows = torch.tensor(positions)
    return SimpleNamespace(positions=lambda size: rows, weight=lambda size: weight, num_parts=len(rows))


def training(positions: list[list[int]], weight: float = 1.0) -> TrainingBatches:
    return TrainingBatches(in_fours, division(positions, weight), 2)


def given(epoch: int) -> list[Tensor]:
    return [batch + 10 * epoch for batch in GIVEN]


def evaluation(count: int, batch: int, shares: tuple[int, ...], rank: int, *ranks: int) -> EvaluationBatches:
    """Return the batches of `count` samples, which are 50, 51, and so on."""
    parallel = DataParallelInfo(len(shares), rank, shares=shares)
    return EvaluationBatches(torch.arange(50, 50 + count), batch, parallel, ranks or None)


def lists(batches: Iterable[Tensor]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_another_epoch_begins_at_its_first_step() -> None:
    place = EpochStart()
    assert (place.epoch, place.start) == (0, 0)
    place.start = 3
    place.set_epoch(0)
    assert (place.epoch, place.start) == (0, 3), "a resumed epoch keeps its start"
    place.set_epoch(2)
    assert (place.epoch, place.start) == (2, 0)
    place.start = 5
    place.set_epoch(1)
    assert (place.epoch, place.start) == (1, 0)


def test_batches_of_two_loaders_are_two_things() -> None:
    """Samplers are compared by identity, as torch's are."""
    assert len({training([[0]]), training([[0]])}) == 2


def test_a_large_epoch_keeps_its_start() -> None:
    place = EpochStart()
    place.set_epoch(int("5000"))
    place.start = 3
    place.set_epoch(int("5000"))
    assert place.start == 3


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ([[0, 1, 2, 3]], [[100, 101, 102, 103], [104, 105, 106, 107]]),
        ([[1, 3]], [[101, 103], [105, 107]]),
        ([[0], [2]], [[100], [102], [104], [106]]),
    ],
)
def test_training_batches_of_a_rank(positions: list[list[int]], expected: list[list[int]]) -> None:
    batches = training(positions)
    assert [batch.tolist() for batch in batches] == lists(batches) == expected
    assert len(batches) == len(expected)


@pytest.mark.parametrize(("start", "expected"), [(0, [0, 1, 4, 5]), (1, [4, 5]), (2, []), (3, [])])
def test_a_resumed_epoch_begins_at_its_start(start: int, expected: list[int]) -> None:
    batches = training([[0, 1]])
    batches.start = start
    assert [place for places in batches.places() for place in places.tolist()] == expected
    assert [place for rows in batches for place in rows.tolist()] == [100 + place for place in expected]
    assert len(batches) == 2, "it counts the whole epoch"


def test_training_batches_of_the_next_epoch() -> None:
    batches = training([[0, 3]])
    batches.set_epoch(1)
    assert lists(batches) == [[200, 203], [204, 207]]


def test_weights_of_training_batches() -> None:
    assert list(training([[0]]).weights()) == [1.0, 1.0]
    assert list(training([[0], [1]], weight=1.5).weights()) == [1.5, 1.5, 1.5, 1.5]


def test_given_batches_are_divided_by_positions() -> None:
    batches = TrainingBatches(given, EVENS, steps=3)
    assert lists(batches.places()) == [[0, 2], [4], [6, 8]]
    assert [batch.tolist() for batch in batches] == [[5, 7], [9], [1, 3]]
    assert list(batches.weights()) == [2 * 2 / 4, 1 * 2 / 2, 2 * 2 / 3]
    assert len(batches) == 3
    batches.set_epoch(1)
    assert [batch.tolist() for batch in batches] == [[15, 17], [19], [11, 13]]


def test_given_batches_of_several_parts() -> None:
    """Each rank has a sample in each of two micro-batches."""
    two_of_four = division([[0], [1]])
    two_of_four.weight = lambda size: 1 * 4 / size
    batches = TrainingBatches(given, two_of_four, steps=2)
    assert [batch.tolist() for batch in batches] == [[5], [6], [9], [0]]
    assert list(batches.weights()) == [1.0, 1.0, 2.0, 2.0]
    assert len(batches) == 4


def test_one_given_batch_in_an_epoch() -> None:
    batches = TrainingBatches(lambda epoch: GIVEN[:1], EVENS, steps=1)
    assert [batch.tolist() for batch in batches] == [[5, 7]]
    assert len(batches) == 1


@pytest.mark.parametrize(
    ("start", "steps", "expected"), [(1, 3, [[9], [1, 3]]), (0, 2, [[5, 7], [9]]), (1, 2, [[9]]), (2, 2, [])]
)
def test_given_batches_of_a_resumed_epoch(start: int, steps: int, expected: list[list[int]]) -> None:
    batches = TrainingBatches(given, EVENS, steps=steps)
    batches.start = start
    assert lists(batches) == expected
    assert len(list(batches.weights())) == len(expected)


@pytest.mark.parametrize(("own", "expected"), [([0], [[5], [7]]), ([1], [[6], [8]]), ([0, 1], [[5], [6], [7], [8]])])
def test_given_batches_of_virtual_ranks(own: list[int], expected: list[list[int]]) -> None:
    single = [torch.tensor([sample]) for sample in (5, 6, 7, 8)]
    batches = TrainingBatches(lambda epoch: single, Division(virtual_ranks=1), steps=2, own=own, per_step=2)
    assert [batch.tolist() for batch in batches] == expected
    assert len(batches) == len(expected)
    assert list(batches.weights()) == [1.0] * len(expected)


def test_given_batches_are_one_virtual_rank_by_default() -> None:
    batches = TrainingBatches(given, Division(virtual_ranks=1), steps=3)
    assert [batch.tolist() for batch in batches] == [batch.tolist() for batch in GIVEN]


@pytest.mark.parametrize(
    ("count", "batch", "shares", "expected"),
    [
        (4, 4, (1,), [[[50, 51, 52, 53]]]),
        (5, 4, (1,), [[[50, 51, -1], [52, 53, 54]]]),
        (1, 4, (1,), [[[50]]]),
        (7, 4, (1, 1), [[[50, 52], [54, 56]], [[51, 53], [55, -1]]]),
        (7, 6, (2, 1), [[[50, 51, -1, -1], [53, 54, 56, -1]], [[52, -1], [55, -1]]]),
        (5, 2, (1, 1, 1), [[[50], [53]], [[51], [54]], [[52], [-1]]]),
        (3, 2, (1, 1, 1), [[[50]], [[51]], [[52]]]),
        (12, 6, (1, 1), [[[50, 52, 54], [56, 58, 60]], [[51, 53, 55], [57, 59, 61]]]),
        (13, 6, (1, 1), [[[50, 52, -1], [54, 56, -1], [58, 60, 62]], [[51, 53, -1], [55, 57, -1], [59, 61, -1]]]),
    ],
)
def test_evaluation_batches(count: int, batch: int, shares: tuple[int, ...], expected: list[list[list[int]]]) -> None:
    ranks = [evaluation(count, batch, shares, rank) for rank in range(len(shares))]
    assert [lists(rank) for rank in ranks] == expected
    assert [[rows.tolist() for rows in rank] for rank in ranks] == expected
    assert [len(rank) for rank in ranks] == [len(table) for table in expected]


def test_evaluation_without_a_sample_has_no_batch() -> None:
    none = evaluation(0, 4, (1, 1), 1)
    assert len(none) == 0
    assert list(none) == []
    none.check_no_rank_is_empty("val")


def test_one_process_evaluates_the_batches_of_several_ranks_in_turn() -> None:
    batches = evaluation(7, 4, (1, 1), 0, 0, 1)
    assert lists(batches) == [[50, 52], [51, 53], [54, 56], [55, -1]]
    assert len(batches) == 4
    assert lists(batches.places()) == [[0, 2], [1, 3], [4, 6], [5, -1]]
    assert lists(evaluation(7, 4, (1, 1), 0, 1)) == [[51, 53], [55, -1]]


def test_equal_shares_are_the_default_in_evaluation() -> None:
    assert lists(EvaluationBatches(torch.arange(4), 4, DataParallelInfo(2, 1))) == [[1, 3]]


def test_an_evaluation_counts_the_samples() -> None:
    assert list(islice(evaluation(4, 4, (1,), 0).weights(), 3)) == [1.0, 1.0, 1.0]


def test_an_evaluation_divides_no_batch_into_parts() -> None:
    assert evaluation(4, 4, (1,), 0).parts_per_step == 1


@pytest.mark.parametrize(
    ("count", "batch", "shares", "parts"),
    [
        (5, 2, (1, 1), None),
        (2, 9, (2, 1), None),
        # Too few samples for any batch size.
        (3, 4, (1, 1, 1, 1), 1),
        (1, 1, (1, 1), 1),
    ],
)
def test_an_evaluation_that_leaves_a_rank_empty(
    count: int, batch: int, shares: tuple[int, ...], parts: int | None
) -> None:
    with pytest.raises(UserError) as caught:
        evaluation(count, batch, shares, 0).check_no_rank_is_empty("test", parts)
    assert str(caught.value) == (
        f"the {count} samples of `test` leave a batch of a process or virtual rank empty: evaluate more of them, set "
        "trainer.limit_test_batches=0, or use fewer trainer.devices"
    )


@pytest.mark.parametrize(
    ("count", "batch", "shares"), [(4, 4, (1, 1, 1, 1)), (6, 2, (1, 1)), (7, 4, (1, 1)), (1, 1, (1,))]
)
def test_an_evaluation_that_leaves_no_rank_empty(count: int, batch: int, shares: tuple[int, ...]) -> None:
    evaluation(count, batch, shares, 0).check_no_rank_is_empty("test")


def test_names_a_batch_size_that_leaves_no_rank_empty() -> None:
    with pytest.raises(UserError, match=r"31 samples of `val` .* empty: set batch_size=4 or more in its loader, evalu"):
        evaluation(31, 1, (1, 1), 0).check_no_rank_is_empty("val", 1)
    with pytest.raises(UserError, match="set batch_size=18 or more"):  # of which an evaluation batch is a third
        evaluation(31, 3, (2, 1), 0).check_no_rank_is_empty("val", 3)


@pytest.mark.parametrize("shares", [(1, 1), (1, 1, 1), (3, 1)])
def test_a_batch_of_two_rounds_or_more_leaves_no_rank_empty(shares: tuple[int, ...]) -> None:
    for count in range(sum(shares) + 1, 40):
        for batch in range(2 * sum(shares), 40):
            evaluation(count, batch, shares, 0).check_no_rank_is_empty("val")
            for rank in range(len(shares)):
                assert all(rows.ge(0).any() for rows in evaluation(count, batch, shares, rank))
