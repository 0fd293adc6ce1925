"""A logger in a background thread: training waits neither for its start nor for its calls."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

_log = logging.getLogger(__name__)
_MAX_DELAY = 10.0  # seconds before the logger starts, because its start would slow down the first training step


class AsyncLogger(Logger):
    """Logger that passes all calls, in order, to the logger that `build` returns in a background thread.

    The thread builds the logger only when there is something to log. Hyperparameters alone are not urgent: they wait
    for the first metrics, at most ten seconds.

    If the logger fails, a warning says so, and training continues without it. `finalize` waits until all calls are
    executed.
    """

    def __init__(self, build: Callable[[], Any], version: str) -> None:
        super().__init__()
        self._build, self._version = build, version
        # These are None until the first call, because Lightning pickles this logger when it spawns ranks.
        self._thread: ThreadPoolExecutor | None = None
        self._may_start: Any = None  # event: there is something to log besides hyperparameters, or the run ends
        self._logger: Any = None
        self._has_failed = False
        self._last_call: Future[None] | None = None

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return self._version

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._enqueue("log_hyperparams", params, *args, **kwargs)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._enqueue("log_metrics", metrics, step)

    @rank_zero_only
    def log_image(self, key: str, images: list[Any], step: int | None = None) -> None:
        self._enqueue("log_image", key, images, step)

    def finalize(self, status: str) -> None:
        if self._last_call is None:
            return
        self._may_start.set()
        # The error of a failed run should not wait long for its logger.
        wait([self._last_call], timeout=None if status == "success" else 10.0)

    def _enqueue(self, method: str, *args: Any, **kwargs: Any) -> None:
        if self._thread is None:
            self._thread, self._may_start = ThreadPoolExecutor(1, "logger"), threading.Event()
        if method != "log_hyperparams":
            self._may_start.set()
        self._last_call = self._thread.submit(self._call_logger, method, args, kwargs)

    def _call_logger(self, method: str, args: Any, kwargs: Any) -> None:
        if self._has_failed:
            return
        try:
            if self._logger is None:
                self._may_start.wait(_MAX_DELAY)
                self._logger = self._build()
            getattr(self._logger, method)(*args, **kwargs)
        except (Exception, SystemExit) as error:  # whatever it is, it must not end the training
            self._has_failed = True
            cause = str(error).strip().split("\n")[0]
            _log.warning("a logger failed, training continues without it: %s: %s", type(error).__name__, cause)
