"""Signals that ask a run to save and stop, which schedulers send before they end a job.

A handler only sets a flag; `src/callbacks/preemption.py` reads it between two steps. The flag of a launcher is a file,
whose path its workers inherit.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
FLAG_FILE = "STOP_FLAG_FILE"  # environment variable of a launcher's workers
_DUPLICATE_WINDOW = 2.0  # seconds in which one request can arrive from the scheduler, its job step and a launcher
_received: list[tuple[int, float]] = []  # signal number and time


class Stopped(SystemExit):
    """The end of a run that has saved after a signal; the exit code is the conventional one, 128 + the number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def install_handlers(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Install the handler for the signals; return the previous handlers."""
    return {number: signal.signal(number, handler) for number in SIGNALS}


def restore_handlers(handlers: dict[int, Any]) -> None:
    """Undo `install_handlers`.

    After a request the handlers stay, because a late copy of it must not change the exit code.
    """
    if not _received:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def on_signal(number: int, frame: Any) -> None:
    """Handle a signal in a rank: record the first request, and end the process at a second one."""
    if record_signal(number):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def record_signal(number: int) -> bool:
    """Record a signal. Return True if it is a second request, not a late copy of the first."""
    _received.append((number, time.monotonic()))
    return _received[-1][1] - _received[0][1] > _DUPLICATE_WINDOW


def requested() -> int:
    """Return the number of the signal that this process, or its launcher, received first; 0 for none."""
    if _received:
        return _received[0][0]
    flag = os.environ.get(FLAG_FILE)
    return int(Path(flag).read_text() or signal.SIGTERM) if flag and Path(flag).exists() else 0


@contextmanager
def forward_to_workers() -> Iterator[None]:
    """In a launcher, forward the first signal to the workers; a second signal ends them at once."""
    from torch.distributed.elastic.multiprocessing import SignalException

    with TemporaryDirectory(prefix="launcher-") as folder:
        flag = Path(folder) / "stop"

        def handler(number: int, frame: Any) -> None:
            if record_signal(number):
                raise SignalException("sent once more", signal.SIGKILL)  # elastic then kills the workers
            flag.write_text(str(number))

        handlers = install_handlers(handler)
        os.environ[FLAG_FILE] = str(flag)
        try:
            yield
        finally:
            del os.environ[FLAG_FILE]
            restore_handlers(handlers)
