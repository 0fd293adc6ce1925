"""End a rank that makes no progress, and write the stacks of its threads beside its log."""

import contextlib
import faulthandler
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

import lightning as L

from src.engine.utils.errors import UserError
from src.engine.utils.process import set_timeouts_after
from src.engine.utils.rank_log import stack_file

_INTERVAL = 1.0  # seconds between two starts of the timer, each of which takes some 50 microseconds


class Watchdog(L.Callback):
    """Ends this rank if it makes no progress within `timeout` seconds.

    The timer runs in C, so it also runs while Python waits in a collective that never returns. The timeout of a process
    group does not name the rank that hangs, only one that waited for it.

    Args:
        folder: the run folder; logs/rankN.stack gets the stacks.
        timeout: seconds; more than it takes to prepare the data, compile, train a step, or save a checkpoint.

    Raises:
        UserError: if `timeout` is not a positive number.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        if not isinstance(timeout, int | float) or timeout <= 0:
            raise UserError(f"launch.timeout={timeout}: give a number of seconds above zero")
        self.folder, self.timeout = folder, timeout
        self._stacks: TextIO | None = None  # open while the timer runs
        self._last_start = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        set_timeouts_after(self.timeout)
        file = stack_file(self.folder, trainer.global_rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._stacks = file.open("a")  # the ranks of an earlier start may have left theirs
        self._last_start = 0.0
        self._restart_timer()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop_timer()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Write where this rank waited if it has lost another one, whose timer ran out first."""
        if self._stacks and _any_written(Path(self._stacks.name).parent):
            traceback.print_exception(exception, file=self._stacks)
        self._stop_timer()

    def on_train_batch_start(self, *_: Any) -> None:
        self._restart_timer()

    def on_validation_batch_start(self, *_: Any) -> None:
        self._restart_timer()

    def on_test_batch_start(self, *_: Any) -> None:
        self._restart_timer()

    def on_predict_batch_start(self, *_: Any) -> None:
        self._restart_timer()

    def on_save_checkpoint(self, *_: Any) -> None:
        self._restart_timer()

    def _restart_timer(self) -> None:
        """Restart the timer, at most once a second."""
        now = time.monotonic()
        if self._stacks and now - self._last_start > _INTERVAL:
            self._last_start = now
            faulthandler.dump_traceback_later(self.timeout, exit=True, file=self._stacks)

    def _stop_timer(self) -> None:
        if self._stacks:
            faulthandler.cancel_dump_traceback_later()
            self._stacks.close()
            file = Path(self._stacks.name)
            if file.exists() and not file.stat().st_size:
                file.unlink()
            self._stacks = None


def _any_written(folder: Path) -> bool:
    """Return whether a rank has written its stacks; a rank that ends removes its empty file meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return any(file.stat().st_size for file in folder.glob("rank*.stack"))
    return False
