"""End a rank that makes no progress, and write its stack to its log and its progress beside that."""

import faulthandler
import os
import time
from pathlib import Path

from src.utils.rank_log import batches_file, log_file, open_log

_INTERVAL = 1.0  # seconds between two postponements of the deadline, each of which takes some 50 microseconds


class Watchdog:
    """Ends the process, once it is armed, unless `beat` or `begin_batch` is called in time.

    Args:
        timeout: seconds from such a call to the end of the process.

    The timer runs in C, so it also runs while Python waits in a collective that never returns. The timeout of a process
    group does not name the rank that hangs, only one that waited for it.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._batches = 0
        self._log: int | None = None  # file descriptors while the watchdog is armed
        self._batches_file: int
        self._last_beat = 0.0

    def arm(self, run_dir: Path, rank: int) -> None:
        """Start the timer."""
        self._log = open_log(log_file(run_dir, rank))
        self._batches_file = os.open(batches_file(run_dir, rank), os.O_WRONLY | os.O_CREAT)
        self._last_beat = 0.0
        self._write_batches()
        self.beat()

    def begin_batch(self) -> None:
        """Count a batch and restart the timer. All ranks count the same batches, so a smaller number is behind."""
        if self._log is not None:
            self._batches += 1
            self._write_batches()
        self.beat()

    def _write_batches(self) -> None:
        os.pwrite(self._batches_file, f"{self._batches:>12}\n".encode(), 0)  # two microseconds

    def beat(self) -> None:
        """Restart the timer, at most once a second."""
        now = time.monotonic()
        if self._log is not None and now - self._last_beat > _INTERVAL:
            self._last_beat = now
            faulthandler.dump_traceback_later(self.timeout, exit=True, file=self._log)

    def disarm(self) -> None:
        """Stop the timer."""
        if self._log is not None:
            faulthandler.cancel_dump_traceback_later()
            os.close(self._log)
            os.close(self._batches_file)
            self._log = None
