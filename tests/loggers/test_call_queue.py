"""Calls in a background thread are executed in order; an error reaches the caller once."""

import pickle
import threading
from typing import Any

import pytest

from src.loggers.call_queue import CallQueue
from tests.support.commands import wait_until


def test_only_the_end_of_the_run_waits_for_calls() -> None:
    calls, may_write = CallQueue(), threading.Event()
    done: list[int] = []
    calls.put(may_write.wait, 60)
    for step in range(20):
        calls.put(done.append, step)
    assert not done
    may_write.set()
    calls.wait()
    assert done == list(range(20))
    calls.put(done.append, 20)  # test, after fit
    calls.wait()
    assert done[-1] == 20


def test_result_is_that_of_the_last_call() -> None:
    """A call may run another one in the thread, as a logger's method uses its experiment."""
    calls, done = CallQueue(), [0]
    calls.put(done.append, 1)
    main = threading.get_ident()
    assert calls.run(lambda: [*done, calls.run(threading.get_ident) != main]) == [0, 1, True]


@pytest.mark.parametrize("ends", [False, True])
def test_calls_that_are_not_urgent_wait_for_an_urgent_one_or_the_end(ends: bool) -> None:
    calls = CallQueue()
    done: list[Any] = []
    calls.put(done.append, "options", urgent=False)
    assert not wait_until(lambda: bool(done), 0.2)
    if not ends:
        calls.put(done.append, "metrics")
    calls.wait()
    assert done == ["options", *([] if ends else ["metrics"])]


def test_calls_that_are_not_urgent_are_executed_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("src.loggers.call_queue._MAX_DELAY", 0.1)
    calls = CallQueue()
    done: list[Any] = []
    calls.put(done.append, "options", urgent=False)
    assert wait_until(lambda: bool(done), 60)


@pytest.mark.parametrize("error", [ValueError("a bad value"), SystemExit(1)])
def test_error_reaches_the_caller_once_and_later_calls_are_executed(error: BaseException) -> None:
    def fail() -> None:
        raise error

    calls = CallQueue()
    done: list[Any] = []
    may_fail = threading.Event()
    calls.put(may_fail.wait, 60)
    calls.put(fail)
    calls.put(done.append, 1)
    may_fail.set()
    with pytest.raises(type(error)):
        calls.wait()
    calls.put(done.append, 2)
    calls.run(lambda: done.append(3))
    assert done == [1, 2, 3]


def fail() -> None:
    raise OSError("no answer")


@pytest.mark.parametrize(("failures", "max_seconds"), [(3, 10.0), (1, -1.0)], ids=["three in a row", "a slow one"])
def test_no_call_is_executed_after_lasting_failure(
    failures: int, max_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("src.loggers.call_queue.MAX_SECONDS", max_seconds)
    calls, may_fail = CallQueue(), threading.Event()
    done: list[int] = []
    calls.put(may_fail.wait, 60)
    for _ in range(failures):
        calls.put(fail)
    calls.put(done.append, 1)
    may_fail.set()
    for use in (calls.wait, calls.wait, lambda: calls.put(done.append, 2), lambda: calls.run(lambda: done.append(3))):
        with pytest.raises(OSError, match="no answer"):
            use()
    assert not done


def test_calls_are_executed_after_failures_that_are_not_in_a_row() -> None:
    calls, may_fail = CallQueue(), threading.Event()
    done: list[int] = []
    calls.put(may_fail.wait, 60)
    for step in range(3):
        calls.put(fail)
        calls.put(fail)
        calls.put(done.append, step)
    may_fail.set()
    with pytest.raises(OSError, match="no answer"):
        calls.wait()
    calls.wait()
    assert done == [0, 1, 2]


def test_can_be_pickled_to_a_spawned_process() -> None:
    calls = CallQueue()
    calls.put(print)
    pickle.loads(pickle.dumps(calls)).wait()
