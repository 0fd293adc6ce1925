"""A logger on its own thread gets messages in order, is awaited at the end, and never ends a training run."""

import pickle
import threading
from functools import partial
from typing import Any

import pytest

from src.loggers.async_logger import AsyncLogger
from tests.support.commands import wait_until


class GatedLogger:
    """A logger that waits for an event before it writes a row, and raises for a negative loss."""

    def __init__(self, rows: list[Any], open_: threading.Event | None = None) -> None:
        self.rows, self.open = rows, open_
        rows.append(threading.current_thread() is threading.main_thread())

    def log_hyperparams(self, params: dict[str, int]) -> None:
        self.rows.append(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None) -> None:
        assert self.open is None or self.open.wait(60)
        if metrics["loss"] < 0:
            raise ValueError("a negative loss")
        self.rows.append(step)


def wait_for(rows: list[Any], count: int) -> None:
    assert wait_until(lambda: len(rows) >= count, 60)


def test_only_the_end_of_the_run_waits_for_rows() -> None:
    rows: list[Any] = []
    may_write = threading.Event()
    logger = AsyncLogger(partial(GatedLogger, rows, may_write), version="1")
    for step in range(20):
        logger.log_metrics({"loss": 1.0}, step)
    assert not [row for row in rows if row is not False], "all messages were accepted, and none is written yet"
    may_write.set()
    logger.finalize("success")
    assert rows == [False, *range(20)]
    logger.log_metrics({"loss": 1.0}, 20)  # test, after fit
    logger.finalize("success")
    assert rows[-1] == 20


def test_logger_without_messages_is_never_built() -> None:
    rows: list[Any] = []
    AsyncLogger(partial(GatedLogger, rows), version="1").finalize("success")
    assert rows == []


@pytest.mark.parametrize("ends", [False, True])
def test_hyperparameters_wait_for_the_first_metrics_or_the_end(ends: bool) -> None:
    rows: list[Any] = []
    logger = AsyncLogger(partial(GatedLogger, rows), version="1")
    logger.log_hyperparams({"width": 3})
    assert not wait_until(lambda: bool(rows), 0.2)
    if not ends:
        logger.log_metrics({"loss": 1.0}, 0)
    logger.finalize("failed" if ends else "success")
    assert rows == [False, {"width": 3}, *([] if ends else [0])]


def test_hyperparameters_are_sent_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.loggers.async_logger._MAX_DELAY", 0.1)
    rows: list[Any] = []
    logger = AsyncLogger(partial(GatedLogger, rows), version="1")
    logger.log_hyperparams({"width": 3})
    wait_for(rows, 2)
    assert rows == [False, {"width": 3}]
    logger.finalize("success")


def test_failed_logger_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    rows: list[Any] = []
    logger = AsyncLogger(partial(GatedLogger, rows), version="1")
    for step, loss in enumerate([1.0, -1.0, -1.0, 1.0]):
        logger.log_metrics({"loss": loss}, step)
    logger.finalize("success")
    assert rows == [False, 0]
    assert caplog.messages == ["a logger failed, training continues without it: ValueError: a negative loss"]


def test_can_be_pickled_to_a_spawned_process() -> None:
    assert pickle.loads(pickle.dumps(AsyncLogger(partial(GatedLogger, []), version="1"))).version == "1"
