"""A logger on a thread of its own: told in order, waited for at the end, and its errors are heard."""

import pickle
import threading
import time
from functools import partial
from typing import Any

import pytest

from src.loggers.background import InBackground


class Slow:
    """Takes its time over each row, and cannot take a negative one."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told
        told.append(threading.current_thread() is threading.main_thread())

    def log_hyperparams(self, params: dict[str, int]) -> None:
        self.told.append(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None) -> None:
        time.sleep(0.02)
        if metrics["loss"] < 0:
            raise ValueError("a negative loss")
        self.told.append(step)


def test_tells_all_in_order_and_waits_for_the_last() -> None:
    told: list[Any] = []
    logger = InBackground(partial(Slow, told), version="1")
    began = time.perf_counter()
    for step in range(20):
        logger.log_metrics({"loss": 1.0}, step)
    assert time.perf_counter() - began < 0.1
    logger.finalize("success")
    assert told == [False, *range(20)]
    logger.log_metrics({"loss": 1.0}, 20)  # test, after fit
    logger.finalize("success")
    assert told[-1] == 20


def test_is_not_made_where_nothing_is_told() -> None:
    told: list[Any] = []
    InBackground(partial(Slow, told), version="1").finalize("success")
    assert told == []


@pytest.mark.parametrize("ends", [False, True])
def test_hyperparameters_wait_for_the_first_metrics_or_the_end(ends: bool) -> None:
    told: list[Any] = []
    logger = InBackground(partial(Slow, told), version="1")
    logger.log_hyperparams({"width": 3})
    time.sleep(0.3)
    assert told == []
    if not ends:
        logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("failed" if ends else "success")
    assert told == [False, {"width": 3}, *([] if ends else [0])]


def test_hyperparameters_do_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.loggers.background._HEAD_START", 0.1)
    told: list[Any] = []
    InBackground(partial(Slow, told), version="1").log_hyperparams({"width": 3})
    deadline = time.monotonic() + 10
    while len(told) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert told == [False, {"width": 3}]


def test_an_error_is_raised_by_what_comes_next() -> None:
    told: list[Any] = []
    logger = InBackground(partial(Slow, told), version="1")
    logger.log_metrics({"loss": -1.0}, 0)
    time.sleep(0.5)
    with pytest.raises(ValueError, match="a negative loss"):
        logger.log_metrics({"loss": 1.0}, 1)
    with pytest.raises(ValueError, match="a negative loss"):
        logger.finalize("success")
    logger.finalize("failed")  # the run has an error of its own
    assert told == [False]


def test_can_be_sent_to_a_process_that_lightning_spawns() -> None:
    assert pickle.loads(pickle.dumps(InBackground(partial(Slow, []), version="1"))).version == "1"
