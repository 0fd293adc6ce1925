"""A queue of calls that one background thread executes in order."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

_MAX_DELAY = 10.0  # seconds before calls that are not urgent are executed


class CallQueue:
    """Executes calls in a background thread, in order.

    A call that is not urgent waits for the first urgent one, at most ten seconds. The next method of the queue
    raises the exception of a call that failed; the other calls are executed.
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
        try:
            return function(*args)
        except (Exception, SystemExit) as error:  # libraries exit as well
            self._error = error
            return None

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
