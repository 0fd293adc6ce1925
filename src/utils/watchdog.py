"""End a rank that makes no progress, and write its stack to its log."""

import faulthandler
import os
import time
from pathlib import Path

from src.utils.rank_log import log_file

_REST = 1.0  # seconds between two postponements, which cost some 50 microseconds each


class Watchdog:
    """Ends the process, once it is armed, unless `beat` is called in time.

    The clock is C's: it runs while Python waits in a collective that never returns. (A process group's own timeout
    names no rank that hangs, only one that waited.)
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._log: int | None = None
        self._beaten = 0.0

    def arm(self, run_dir: Path, rank: int) -> None:
        """Start the clock."""
        file = log_file(run_dir, rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._log = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._beaten = 0.0
        self.beat()

    def beat(self) -> None:
        """Start the clock afresh, at most once a second."""
        now = time.monotonic()
        if self._log is not None and now - self._beaten > _REST:
            self._beaten = now
            faulthandler.dump_traceback_later(self.timeout, exit=True, file=self._log)

    def disarm(self) -> None:
        """Stop the clock."""
        if self._log is not None:
            faulthandler.cancel_dump_traceback_later()
            os.close(self._log)
            self._log = None
