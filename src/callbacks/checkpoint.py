"""The latest state, saved as often as asked for."""

import time
from datetime import timedelta
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from src.utils.consensus import RankConsensus
from src.utils.errors import UserError


class LastCheckpoint(ModelCheckpoint):
    """Keeps one checkpoint: the state at the end of the latest epoch, after its validation, or at a later step.

    Lightning's ModelCheckpoint does not fit: saving at a step or a time would replace the save at the end of the epoch,
    a time interval costs a broadcast at every step, and `save_last` skips epochs in which the monitored metric did not
    improve. A checkpoint of a step is written when the next step begins, because before that the step's metrics and an
    epoch's validation are not yet logged.

    Args:
        dirpath: the folder.
        every_n_train_steps: save also every so many optimizer steps.
        train_time_interval: save also after this time since the last save on any rank, as the arguments of timedelta,
            such as {minutes: 10}.
        filename: without its ending.

    Raises:
        UserError: if an interval is not valid.
    """

    def __init__(
        self,
        dirpath: str,
        every_n_train_steps: int | None = None,
        train_time_interval: dict[str, float] | None = None,
        filename: str = "last",
    ) -> None:
        super().__init__(dirpath, filename, enable_version_counter=False, save_on_train_epoch_end=True)
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise UserError(
                f"callbacks.checkpoint.every_n_train_steps={every_n_train_steps}: give one or more, or null"
            )
        self._steps = every_n_train_steps
        self._seconds = _seconds(train_time_interval)
        self._saved_at = time.monotonic()
        self._consensus = RankConsensus()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_at, self._consensus = time.monotonic(), RankConsensus()
        self._last_global_step_saved = trainer.global_step  # what a resumed run begins with is saved already

    on_train_batch_end = None  # type: ignore[assignment]  # Lightning's would save here already

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, _: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches:
            return
        due = self._steps is not None and trainer.global_step % self._steps == 0
        if self._seconds is not None:
            due = bool(self._consensus.poll(trainer, self._is_save_due)) or due
        if due and not self._should_skip_saving_checkpoint(trainer):
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        self._saved_at = time.monotonic()

    def _is_save_due(self) -> int:
        return int(time.monotonic() - self._saved_at >= (self._seconds or 0.0))


def _seconds(interval: dict[str, float] | None) -> float | None:
    try:
        return timedelta(**interval).total_seconds() if interval is not None else None
    except TypeError:
        raise UserError(
            f"callbacks.checkpoint.train_time_interval={interval}: give a time, such as '{{minutes: 10}}', or null"
        ) from None
