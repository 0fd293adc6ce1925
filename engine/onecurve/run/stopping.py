"""End a run: all ranks together after a signal, or a rank alone that makes no progress."""

import faulthandler
import logging
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import lightning as L

from onecurve.errors import UserError
from onecurve.observe.steps import trained_steps
from onecurve.process import signals
from onecurve.process.consensus import RankConsensus
from onecurve.process.groups import set_timeouts_after
from onecurve.process.log import log_file, report_error
from onecurve.records.events import append_event, end_of, stop_message
from onecurve.records.files import CHECKPOINTS, LAST
from onecurve.run.saving import LastCheckpoint

_log = logging.getLogger(__name__)
_MAX_HANDLING = 20.0  # seconds for what callbacks do after an error
_INTERVAL = 1.0  # seconds between two starts of the watchdog's timer, each of which takes some 50 microseconds


class PreemptionHandler(L.Callback):
    """Saves between two steps, and ends the run there after any rank, or the launcher, has received a signal.

    The signals are SIGINT, SIGTERM and SIGUSR1.

    Lightning's own handlers are not installed, because they run collectives wherever the signal interrupts the process.
    A signal during the validation of a fit takes effect after it.

    Raises:
        Stopped: on all ranks at the same step; in training after `last.ckpt` is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._handlers: dict[int, Any] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._consensus = RankConsensus()
        self._handlers = signals.install_handlers(signals.on_signal)

    def teardown(self, *_: Any, **__: Any) -> None:
        signals.restore_handlers(self._handlers)

    on_exception = teardown

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, _: Any, batch_idx: int) -> None:
        """Stop or save before a step, because the previous step and its validation are then logged."""
        self._stop_if_requested(trainer, should_save=True)
        for one in _last_checkpoints(trainer):
            one.save_if_due(trainer)

    def on_test_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any, **__: Any) -> None:
        data = trainer.datamodule
        # Ranks may have different numbers of virtual ranks, each of which has a batch of its own.
        if not data.bit_exact or batch_idx % len(data.division.own_virtual_ranks) == 0:
            self._stop_if_requested(trainer)

    on_predict_batch_start = on_test_batch_start

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.state.fn == "validate":  # not the validation of a fit
            self.on_test_batch_start(trainer, *args)

    def _stop_if_requested(self, trainer: L.Trainer, should_save: bool = False) -> None:
        signal_number = self._consensus.poll(trainer, signals.requested)
        is_resize = signal_number == signals.RESIZE
        if not signal_number or (is_resize and not should_save):  # more ranks would begin a test again
            return
        if should_save:
            self._save(trainer)
        stopped = signals.Stopped(signal_number)
        signals.drop_lost_readers()
        if trainer.is_global_zero:
            if not is_resize:  # of which the launcher prints a line
                place = f" at step {trained_steps(trainer)}" if should_save else ""
                _log.info(stop_message(signal_number, self.folder, place))
            if should_save:  # `failure_recorded` records the end of an evaluation
                event, reason = end_of(stopped)
                append_event(self.folder, event, trained_steps(trainer), reason)
        raise stopped

    def _save(self, trainer: L.Trainer) -> None:
        """Save `last.ckpt` of the run folder, also of a run whose callbacks keep none or have another folder."""
        file = self.folder / CHECKPOINTS / LAST
        savers = [one for one in _last_checkpoints(trainer) if Path(one.best_model_path).resolve() == file.resolve()]
        if savers:
            savers[0].save(trainer)
        else:
            trainer.save_checkpoint(file, weights_only=False)


def _last_checkpoints(trainer: L.Trainer) -> list[LastCheckpoint]:
    return [one for one in trainer.checkpoint_callbacks if isinstance(one, LastCheckpoint)]


class Watchdog(L.Callback):
    """Ends this rank if it makes no progress within `timeout` seconds, and writes the stacks of its threads to its log.

    The timer runs in C, so it also runs while Python waits in a collective that never returns. The timeout of a process
    group does not name the rank that hangs, only one that waited for it.

    Args:
        timeout: seconds; more than it takes to prepare the data, compile, train a step, or save a checkpoint.
    """

    def __init__(self, folder: Path, timeout: float) -> None:
        if not isinstance(timeout, int | float) or timeout <= 0:
            raise UserError(f"launch.timeout={timeout}: give a number of seconds above zero")
        self.folder, self.timeout = folder, timeout
        self._rank_log: TextIO | None = None  # open while the timer runs

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        set_timeouts_after(self.timeout)
        if hasattr(sys, "ps1"):  # in a notebook or a prompt a debugger may wait for the user, and the kernel must stay
            return
        file = log_file(self.folder, trainer.global_rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._rank_log = file.open("a")
        self._last_start = 0.0
        self._restart_timer()

    def on_fit_start(self, *_: Any) -> None:
        set_timeouts_after(self.timeout)  # also of groups that other callbacks have made in their `setup`

    def _restart_timer(self, *_: Any, **__: Any) -> None:
        """Restart the timer, at most once a second."""
        now = time.monotonic()
        if self._rank_log and now - self._last_start > _INTERVAL:
            self._last_start = now
            faulthandler.dump_traceback_later(self.timeout, exit=True, file=self._rank_log)

    on_train_batch_start = on_validation_batch_start = on_test_batch_start = _restart_timer
    on_predict_batch_start = on_save_checkpoint = _restart_timer

    def teardown(self, *_: Any, **__: Any) -> None:
        if self._rank_log:
            faulthandler.cancel_dump_traceback_later()
            self._rank_log.close()
            self._rank_log = None

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Report the error of a rank before callbacks handle it, which get some seconds, as they may communicate."""
        if self._rank_log and isinstance(exception, Exception) and report_error(exception):
            faulthandler.dump_traceback_later(_MAX_HANDLING, exit=True, file=self._rank_log)
            self._rank_log = None  # faulthandler keeps it open
        self.teardown()
