"""A queue of calls that one background thread executes in order."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

_MAX_DELAY = 10.0  # seconds before calls that are not urgent are executed


class CallQueue:
    """Executes calls in a background thread, in order, until one fails.

    A call that is not urgent waits for the first urgent one, at most ten seconds. The exception of a call is raised by
    the next method of the queue, and later calls are skipped.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._thread_id: int | None = None
        self._may_start = threading.Event()  # there is an urgent call, or the run ends
        self._last: Future[Any] | None = None
        self._error: BaseException | None = None

    def __reduce__(self) -> Any:
        return CallQueue, ()  # a spawned process gets an empty queue

    def put(self, function: Callable[..., Any], *args: Any, urgent: bool = True) -> "Future[Any]":
        """Append a call."""
        self._raise_error()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "logger")
        if urgent:
            self._may_start.set()
        self._last = self._thread.submit(self._execute, function, args)
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
        if self._error is not None:
            return None
        self._thread_id = threading.get_ident()
        self._may_start.wait(_MAX_DELAY)
        try:
            return function(*args)
        except (Exception, SystemExit) as error:  # libraries exit as well
            self._error = error
            return None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
