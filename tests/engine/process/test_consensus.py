"""Ranks agree on an answer, and on the next poll."""

import itertools
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from onecurve.process.consensus import RankConsensus


def rank(*others: list[int]) -> Any:
    """Return the trainer of a rank beside others, with what these answer, and their intervals as negative numbers."""

    def reduce(answers: torch.Tensor, reduce_op: str) -> torch.Tensor:
        assert reduce_op == "max"
        return torch.stack([answers, *map(torch.tensor, others)]).max(0).values

    strategy = SimpleNamespace(reduce=reduce, root_device=torch.device("cpu"))
    return SimpleNamespace(world_size=1 + len(others), strategy=strategy)


def polls(consensus: RankConsensus, trainer: Any, number: int) -> list[int]:
    """Return the steps, of so many, at which a rank is asked."""
    asked = []
    for step in range(number):
        ask = Mock(return_value=0)
        consensus.poll(trainer, ask)
        if ask.called:
            asked.append(step)
    return asked


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock by which no time passes, so that steps are fast."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("onecurve.process.consensus.time", clock)
    return clock


def test_polls_become_rarer_while_steps_are_fast(clock: SimpleNamespace) -> None:
    assert polls(RankConsensus(), rank(), 700) == [0, 2, 6, 14, 30, 62, 126, 254, 454, 654]


def test_polls_are_one_second_apart(clock: SimpleNamespace) -> None:
    """Of steps that take a quarter of a second."""
    consensus, asked = RankConsensus(), []
    for step in range(100):
        clock.now += 0.25
        asked += polls(consensus, rank(), 1) and [step]
    assert {later - earlier for earlier, later in itertools.pairwise(asked[3:])} == {4}


def test_ranks_take_the_shortest_interval_and_the_largest_answer(clock: SimpleNamespace) -> None:
    """A rank with an interval of its own would wait in a collective that the others do not call."""
    consensus = RankConsensus()
    slow = rank([0, -2], [15, -1])
    assert consensus.poll(slow, lambda: 2) == 15
    assert polls(consensus, slow, 4) == [0, 1, 2, 3]
    assert polls(consensus, rank([0, -3]), 5) == [0, 2]


def test_polls_follow_the_speed_since_the_last_poll(clock: SimpleNamespace) -> None:
    """Eight steps in 0.8 seconds make ten steps per second."""
    consensus = RankConsensus()
    assert polls(consensus, rank(), 7) == [0, 2, 6]
    clock.now = 0.8
    assert polls(consensus, rank(), 19) == [7, 17]


@pytest.mark.parametrize(("seconds", "expected"), [(3.0, [0, 1, 2, 3, 4, 5]), (0.9, [0, 1, 2, 3, 4, 5])])
def test_slow_steps_are_polled_one_by_one(clock: SimpleNamespace, seconds: float, expected: list[int]) -> None:
    consensus, asked = RankConsensus(), []
    for step in range(6):
        clock.now += seconds
        asked += polls(consensus, rank(), 1) and [step]
    assert asked == expected


def test_steps_between_polls_answer_zero(clock: SimpleNamespace) -> None:
    consensus = RankConsensus()
    assert [consensus.poll(rank(), lambda: 15) for _ in range(4)] == [15, 0, 15, 0]


def test_one_rank_asks_no_other(clock: SimpleNamespace) -> None:
    """Its trainer has no strategy here."""
    trainer: Any = SimpleNamespace(world_size=1)
    assert RankConsensus().poll(trainer, lambda: 2) == 2


def test_two_ranks_ask_each_other(clock: SimpleNamespace) -> None:
    assert RankConsensus().poll(rank([9, -1]), lambda: 2) == 9
