"""A queue of calls that one background thread executes in order."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from src.loggers.guard import MAX_FAILURES, MAX_SECONDS

_MAX_DELAY = 10.0  # seconds before calls that are not urgent are executed


class CallQueue:
    """Executes calls in a background thread, in order.

    A call that is not urgent waits for the first urgent one, at most ten seconds. The next method of the queue
    raises the exception of a call that failed; the other calls are executed. After three failures in a row, or one
    that takes longer than ten seconds, no call is executed, and `put`, `run` and `wait` always raise the exception.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._thread_id: int | None = None
        self._may_start = threading.Event()  # there is an urgent call, or the run ends
        self._last: Future[Any] | None = None
        self._error: BaseException | None = None
        self._failures = 0  # in a row
        self._final_error: BaseException | None = None  # of the failure after which no call is executed

    def __reduce__(self) -> Any:
        return CallQueue, ()  # a spawned process gets an empty queue

    def put(self, function: Callable[..., Any], *args: Any, urgent: bool = True) -> "Future[Any]":
        """Append a call."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "logger")
        if urgent:
            self._may_start.set()
        self._last = self._thread.submit(self._execute, function, args)
        self._raise_error()
        return self._last

    def run(self, function: Callable[[], Any]) -> Any:
        """Execute a call after all others, and return its result. A call of the thread itself is executed at once."""
        if threading.get_ident() == self._thread_id:
            return function()
        result = self.put(function).result()
        self._raise_error()
        return result

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all calls are executed, or for some seconds."""
        self._may_start.set()
        if self._last is not None:
            wait([self._last], timeout)
        self._raise_error()

    def _execute(self, function: Callable[..., Any], args: Any) -> Any:
        self._thread_id = threading.get_ident()
        self._may_start.wait(_MAX_DELAY)
        if self._final_error is not None:
            return None
        start = time.monotonic()
        try:
            result = function(*args)
        except (Exception, SystemExit) as error:  # libraries exit as well
            self._record_failure(error, time.monotonic() - start)
            return None
        self._failures = 0
        return result

    def _record_failure(self, error: BaseException, seconds: float) -> None:
        self._error = error
        self._failures += 1
        # The guard does not see these failures, since `put` returns before them.
        if self._failures == MAX_FAILURES or seconds > MAX_SECONDS:
            self._final_error = error

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if self._final_error is not None:
            raise self._final_error
        if error is not None:
            raise error
