"""A logger on a thread of its own, so that training waits neither for it to start nor for what it is told."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

_HEAD_START = 10.0  # seconds for the first step, which a logger that starts beside it would slow down


class AsyncLogger(Logger):
    """Hands everything on to the logger that `make` builds, in order, and makes that only when there is something.

    If it is hyper-parameters, nobody waits for them: they are kept for the first metrics, or for ten seconds.

    What goes wrong there is raised by the next call here, and `finalize` waits until all is told.
    """

    def __init__(self, make: Callable[[], Any], version: str) -> None:
        super().__init__()
        self._make, self._version = make, version
        self._thread: ThreadPoolExecutor | None = None  # not now: what Lightning spawns gets this logger pickled
        self._awaited: Any = None  # the event that there are metrics, or that all ends
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
        else:  # a run that fails has an error of its own to tell, and is not given long
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
            before.result()  # an error is never overtaken
        if self._logger is None:
            self._awaited.wait(_HEAD_START)
            self._logger = self._make()
        getattr(self._logger, method)(*args, **kwargs)
