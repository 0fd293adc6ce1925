"""A job that is pre-empted saves and stops, all ranks together."""

import logging
from pathlib import Path
from signal import Signals
from typing import Any

import lightning as L

from src.checkpoint.run_files import CHECKPOINTS, LAST
from src.utils import signals
from src.utils.consensus import RankConsensus

_log = logging.getLogger(__name__)


class PreemptionHandler(L.Callback):
    """Ends the run between two steps once any rank, or the launcher, was sent SIGTERM or SIGUSR1.

    Lightning's handlers, which run collectives wherever a signal finds the process, are not installed. A signal that
    comes during validation is heeded after it.

    Raises:
        Stopped: on all ranks in the same step, once `last.ckpt` is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._consensus = RankConsensus()
        self._handlers: dict[int, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._consensus = RankConsensus()
        self._handlers = signals.install_handlers(signals.on_signal)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        signals.restore(self._handlers)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        signals.restore(self._handlers)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, _: Any, batch_idx: int) -> None:
        """Stop before a step, because the previous step and its validation are then logged and saved."""
        if batch_idx % trainer.accumulate_grad_batches:
            return
        if number := self._consensus.poll(trainer, signals.requested):
            if not trainer.fast_dev_run:
                trainer.save_checkpoint(self.folder / CHECKPOINTS / LAST)
            self._log_stop(trainer, number)
            raise signals.Stopped(number)

    def on_test_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._stop_if_requested(trainer)

    def on_predict_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._stop_if_requested(trainer)

    def _stop_if_requested(self, trainer: L.Trainer) -> None:
        if number := self._consensus.poll(trainer, signals.requested):
            self._log_stop(trainer, number)
            raise signals.Stopped(number)

    def _log_stop(self, trainer: L.Trainer, number: int) -> None:
        if trainer.is_global_zero:
            at = f"stopped by {Signals(number).name} at step {trainer.global_step}"
            _log.info("%s; ckpt_path=%s goes on from there", at, self.folder)
