"""Save and stop a preempted job, on all ranks together."""

import logging
from pathlib import Path
from signal import Signals
from typing import Any

import lightning as L

from src.engine.state.run_files import CHECKPOINTS, LAST, stop_message
from src.engine.utils import signals
from src.engine.utils.events import append_event
from src.engine.utils.steps import RankConsensus

_log = logging.getLogger(__name__)


class PreemptionHandler(L.Callback):
    """Ends the run between two steps after any rank, or the launcher, has received SIGINT, SIGTERM or SIGUSR1.

    Lightning's own handlers are not installed, because they run collectives wherever the signal interrupts the process.
    A signal during validation takes effect after it.

    Raises:
        Stopped: on all ranks at the same step, after `last.ckpt` is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._consensus = RankConsensus()
        self._handlers: dict[int, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._consensus = RankConsensus()
        self._handlers = signals.install_handlers(signals.on_signal)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        signals.restore_handlers(self._handlers)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        signals.restore_handlers(self._handlers)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, _: Any, batch_idx: int) -> None:
        """Stop before a step, because the previous step and its validation are then logged and saved."""
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._stop_if_requested(trainer, should_save=not trainer.fast_dev_run)

    def on_test_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._stop_if_requested(trainer)

    def on_predict_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._stop_if_requested(trainer)

    def _stop_if_requested(self, trainer: L.Trainer, should_save: bool = False) -> None:
        signal_number = self._consensus.poll(trainer, signals.requested)
        if not signal_number:
            return
        if should_save:
            trainer.save_checkpoint(self.folder / CHECKPOINTS / LAST)
        if trainer.is_global_zero:
            _log.info(stop_message(signal_number, self.folder, f" at step {trainer.global_step}"))
            if not trainer.fast_dev_run:
                append_event(self.folder, "stopped", trainer.global_step, Signals(signal_number).name)
        raise signals.Stopped(signal_number)
