"""A logger in a background thread, so that training waits neither for its start nor for its calls."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

# Seconds that the first training step has before the logger starts, which would slow the step down.
_HEAD_START = 10.0


class AsyncLogger(Logger):
    """Logger that passes all calls, in order, to the logger that `make` builds in a background thread.

    The thread builds the logger only when there is something to log. Hyperparameters alone are not urgent: they wait
    for the first metrics, at most ten seconds.

    The next call in the training process raises an error of the thread. `finalize` waits until all calls are executed.
    """

    def __init__(self, make: Callable[[], Any], version: str) -> None:
        super().__init__()
        self._make, self._version = make, version
        self._thread: ThreadPoolExecutor | None = None  # not yet: Lightning pickles this logger when it spawns ranks
        self._awaited: Any = None  # event: there is something to log besides hyperparameters, or the run ends
        self._logger: Any = None
        self._last: Future[None] | None = None

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return self._version

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._tell("log_hyperparams", params, *args, **kwargs)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._tell("log_metrics", metrics, step)

    @rank_zero_only
    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        self._tell("log_image", key, images, step)

    def finalize(self, status: str) -> None:
        if self._last is None:
            return
        self._awaited.set()
        if status == "success":
            self._last.result()
        else:  # the error of a failed run is more important, so the wait is short
            wait([self._last], timeout=10.0)

    def _tell(self, method: str, *args: Any, **kwargs: Any) -> None:
        if self._last is not None and self._last.done():
            self._last.result()
        if self._thread is None:
            self._thread, self._awaited = ThreadPoolExecutor(1, "logger"), threading.Event()
        if method != "log_hyperparams":
            self._awaited.set()
        self._last = self._thread.submit(self._pass_on, self._last, method, args, kwargs)

    def _pass_on(self, before: Future[None] | None, method: str, args: Any, kwargs: Any) -> None:
        if before is not None:
            before.result()  # after an error, all later calls fail with it
        if self._logger is None:
            self._awaited.wait(_HEAD_START)
            self._logger = self._make()
        getattr(self._logger, method)(*args, **kwargs)
