"""The steps at which ranks log and are compared."""

from types import SimpleNamespace
from typing import Any

import pytest

from onecurve.observe.steps import is_checked_step, is_compared_step, is_log_point, trained_steps


@pytest.mark.parametrize(
    ("interval", "last_step", "expected"),
    [
        (4, 11, [1, 4, 8, 11, 12]),
        (4, 8, [1, 4, 8, 12]),
        (1, 3, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (50, 12, [1, 12]),
        (50, 1, [1]),
    ],
)
def test_log_points(interval: int, last_step: int, expected: list[int]) -> None:
    trainer: Any = SimpleNamespace(log_every_n_steps=interval, last_step=last_step)
    assert [step for step in range(1, 13) if is_log_point(trainer, step)] == expected


def test_the_last_step_is_a_log_point_in_a_long_run() -> None:
    trainer: Any = SimpleNamespace(log_every_n_steps=1000, last_step=int("70001"))
    assert [step for step in range(70_000, 70_004) if is_log_point(trainer, step)] == [70_000, 70_001]


def test_log_points_without_a_known_last_step() -> None:
    trainer: Any = SimpleNamespace(log_every_n_steps=5)
    assert [step for step in range(1, 13) if is_log_point(trainer, step)] == [1, 5, 10]


def test_trained_steps_are_batches() -> None:
    progress = SimpleNamespace(total=SimpleNamespace(processed=3))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    assert trained_steps(SimpleNamespace(fit_loop=loop, global_step=6)) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(("done", "expected"), [(0, True), (1, True), (2, False), (3, True), (9, True), (10, False)])
def test_steps_that_are_compared(done: int, expected: bool) -> None:
    progress = SimpleNamespace(total=SimpleNamespace(processed=done))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
    trainer: Any = SimpleNamespace(log_every_n_steps=10, fit_loop=loop)
    assert is_compared_step(trainer) is expected


def test_checked_steps_double() -> None:
    assert [step for step in range(1, 600) if is_checked_step(step)] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
