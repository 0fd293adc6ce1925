"""Limits of steps and samples, as a count or as a fraction, by values that were worked out by hand."""

import math
from typing import Any

import pytest

from onecurve.data.limits import apply_limit, total_steps
from onecurve.errors import UserError

OPTION = "trainer.limit_train_batches"


@pytest.mark.parametrize(
    ("limit", "available", "unit", "expected"),
    [
        (None, 7, 1, 7),
        (None, 0, 5, 0),
        (0, 7, 1, 0),
        (1, 7, 1, 1),
        (6, 7, 1, 6),
        (7, 7, 1, 7),
        (8, 7, 1, 7),
        (2, 100, 32, 64),
        (4, 100, 32, 100),
        (0, 100, 32, 0),
        (3, 0, 1, 0),
        (0.0, 7, 1, 0),
        (0.5, 7, 1, 3),
        (0.5, 8, 32, 4),
        (0.99, 7, 1, 6),
        (1.0, 7, 1, 7),
        (1.0, 100, 32, 100),
        (0.5, 0, 1, 0),
    ],
)
def test_limit_as_a_count_or_a_fraction(limit: Any, available: int, unit: int, expected: int) -> None:
    assert apply_limit(OPTION, limit, available, unit) == expected


def test_a_limit_counts_steps_by_default() -> None:
    assert apply_limit(OPTION, 2, 7) == 2


@pytest.mark.parametrize("limit", [-1, -0.1, 1.01, 2.0, math.nan, math.inf, True, False, "5"])
def test_a_limit_is_a_count_or_a_fraction(limit: Any) -> None:
    with pytest.raises(UserError) as caught:
        apply_limit(OPTION, limit, 7)
    assert (
        str(caught.value) == f"{OPTION}={limit}: set a number of batches of data.batch_size, or a fraction such as 0.5"
    )


@pytest.mark.parametrize(("limit", "available"), [(0.1, 7), (0.5, 1)])
def test_a_limit_above_zero_leaves_something(limit: float, available: int) -> None:
    with pytest.raises(UserError) as caught:
        apply_limit(OPTION, limit, available)
    assert str(caught.value) == f"{OPTION}={limit} leaves nothing of {available}: set a larger value"


@pytest.mark.parametrize(("limit", "expected"), [(5, 5), (1, 1), (0, 0), (None, None), (1.0, None)])
def test_limit_of_a_stream(limit: Any, expected: int | None) -> None:
    assert apply_limit(OPTION, limit, None) == expected


@pytest.mark.parametrize("limit", [0.0, 0.5, 0.99])
def test_a_stream_has_no_fraction(limit: float) -> None:
    with pytest.raises(UserError) as caught:
        apply_limit(OPTION, limit, None)
    assert str(caught.value) == f"{OPTION}={limit}, but a stream has no length: set a number of batches"


@pytest.mark.parametrize("limit", [-1, 1.5, True])
def test_a_limit_of_a_stream_is_a_count(limit: Any) -> None:
    with pytest.raises(UserError, match=rf"^{OPTION}={limit}: set a number of batches of data.batch_size"):
        apply_limit(OPTION, limit, None)


@pytest.mark.parametrize(
    ("max_epochs", "max_steps", "expected"),
    [
        (3, -1, 33),
        (3, 100, 33),
        (3, 20, 20),
        (3, 33, 33),
        (3, 0, 0),
        (0, -1, 0),
        (1, -1, 11),
        (None, 20, 20),
        (-1, 20, 20),
        (None, 1, 1),
        (None, -1, 11_000),
        (-1, -1, 11_000),
        (1000, -1, 11_000),
        (1001, -1, 11_011),
    ],
)
def test_the_limit_that_ends_a_run_first(max_epochs: int | None, max_steps: int, expected: int) -> None:
    assert total_steps(max_epochs, max_steps, steps_per_epoch=11) == expected
