"""The checkpoint of the latest state of a run, `last.ckpt`."""

import time
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Checkpoint

from onecurve.errors import UserError
from onecurve.observe.steps import trained_steps
from onecurve.process.consensus import RankConsensus
from onecurve.records.files import LAST


class LastCheckpoint(Checkpoint):
    """Keeps one checkpoint: the state at the end of an epoch, after its validation, or at a later step.

    The end of the last epoch is always saved.

    Lightning's ModelCheckpoint does not fit. Its saves at a step or a time replace the save at the end of the epoch, a
    time interval costs a broadcast at every step, and `save_last` skips epochs in which the monitored metric did not
    improve. The checkpoint of a step is written when the next step begins, because before that the step's metrics and
    an epoch's validation are not yet logged. `PreemptionHandler` calls `save_if_due` then, before other callbacks begin
    the step; Lightning calls the hooks of checkpoint callbacks last.

    Args:
        every_n_epochs: epochs between saves; None for a save at the end of the run only.
        every_n_train_steps: optimizer steps between additional saves.
        train_time_interval: seconds after the last save at which a rank requests another.
    """

    # A logger that uploads checkpoints reads these, as of a ModelCheckpoint that monitors nothing.
    monitor, best_model_score, save_top_k = None, None, 1

    def __init__(
        self,
        dirpath: str,
        every_n_epochs: int | None = 1,
        every_n_train_steps: int | None = None,
        train_time_interval: float | None = None,
    ) -> None:
        for name, interval in {"every_n_epochs": every_n_epochs, "every_n_train_steps": every_n_train_steps}.items():
            if interval is not None and interval < 1:
                raise UserError(f"callbacks.checkpoint.{name}={interval}: give at least 1, or null")
        self.best_model_path = str(Path(dirpath) / LAST)  # the name that loggers read
        self._epoch_interval, self._step_interval = every_n_epochs, every_n_train_steps
        self._time_interval = train_time_interval

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_at, self._consensus = time.monotonic(), RankConsensus()
        self._saved_step = trained_steps(trainer)  # a resumed run begins with a state that is saved already

    def save_if_due(self, trainer: L.Trainer) -> None:
        """Save before a step, if the number of steps or the time says so. Every rank must call it before each step."""
        should_save = self._step_interval is not None and trained_steps(trainer) % self._step_interval == 0
        if self._time_interval is not None:
            # Every rank must poll at every step, also when the step alone decides.
            is_over = time.monotonic() - self._saved_at >= self._time_interval
            should_save = bool(self._consensus.poll(trainer, lambda: is_over)) or should_save
        if should_save:
            self._save_once(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epochs = trainer.current_epoch + 1
        has_all_steps = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        is_last = trainer.should_stop or has_all_steps or epochs == trainer.max_epochs
        if is_last or (self._epoch_interval and epochs % self._epoch_interval == 0):
            self._save_once(trainer)

    def _save_once(self, trainer: L.Trainer) -> None:
        if trained_steps(trainer) != self._saved_step:
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Save, and tell the loggers. Every rank must call it."""
        trainer.save_checkpoint(self.best_model_path, weights_only=False)
        self._saved_step, self._saved_at = trained_steps(trainer), time.monotonic()
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)  # type: ignore[arg-type]
