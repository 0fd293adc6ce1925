"""Reset the watchdog at every step."""

from pathlib import Path
from typing import Any

import lightning as L

from src.utils.errors import UserError
from src.utils.process_group import set_timeouts_after
from src.utils.watchdog import Watchdog


class Heartbeat(L.Callback):
    """Ends this rank if it makes no progress within `timeout` seconds.

    Args:
        folder: the run folder, where the rank's log gets its stack.
        timeout: seconds; more than it takes to prepare the data, compile, train a step, or save a checkpoint.

    Raises:
        UserError: if `timeout` is not a positive number.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        if not isinstance(timeout, int | float) or timeout <= 0:
            raise UserError(f"launch.timeout={timeout}: give a number of seconds above zero")
        self.folder = folder
        self._watchdog = Watchdog(timeout)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        set_timeouts_after(self._watchdog.timeout)
        self._watchdog.arm(self.folder, trainer.global_rank)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._watchdog.disarm()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._watchdog.disarm()

    def on_train_batch_start(self, *_: Any) -> None:
        self._watchdog.begin_batch()

    def on_validation_batch_start(self, *_: Any) -> None:
        self._watchdog.begin_batch()

    def on_test_batch_start(self, *_: Any) -> None:
        self._watchdog.begin_batch()

    def on_predict_batch_start(self, *_: Any) -> None:
        self._watchdog.begin_batch()

    def on_save_checkpoint(self, *_: Any) -> None:
        self._watchdog.beat()
