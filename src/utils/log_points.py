"""The steps at which training metrics are logged."""

import lightning as L
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector


def is_log_point(trainer: L.Trainer, step: int) -> bool:
    """Return whether training metrics are logged at an optimizer step: the first, the last, and each interval's end.

    Args:
        trainer: its `log_every_n_steps` is the interval, and its `last_step` the last step, which `RunRecord` sets.
        step: number of the step, counted from one: `trainer.global_step` after the step, one more before it.
    """
    return step % trainer.log_every_n_steps == 0 or step == 1 or step == getattr(trainer, "last_step", None)


def log_first_and_last_step(trainer: L.Trainer) -> None:
    """Let Lightning pass the metrics of the first and the last step to the loggers, not only those of each interval.

    Upstream: trainer/connectors/logger_connector/logger_connector.py, line 51.
    """
    trainer._logger_connector.__class__ = _LogPointConnector


class _LogPointConnector(_LoggerConnector):
    @property
    def should_update_logs(self) -> bool:
        steps = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        return super().should_update_logs or (self.trainer.training and is_log_point(self.trainer, steps + 1))
