"""Patches of Lightning 2.6's training loop that results depend on.

Each function is one patch. It names Lightning's lines, relative to
https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/. When Lightning changes,
`tests/engine/run/test_trainer_patches.py` or `tests/engine/test_canaries.py` fails.
"""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric

from src.engine.utils.steps import is_log_point


def patch_trainer(trainer: L.Trainer) -> None:
    """Apply all patches to a trainer."""
    leave_signals_to_callback(trainer)
    replace_results(trainer)
    log_first_and_last_step(trainer)


def leave_signals_to_callback(trainer: L.Trainer) -> None:
    """Remove Lightning's signal handlers, and its broadcast at every step of whether a rank received SIGTERM.

    The handler broadcasts wherever the signal interrupts the process, so ranks could wait for each other forever. To
    replace it in `on_train_start` would be too late: it is active in the barrier and the sanity check before.
    `src/engine/run/preemption.py` handles signals. Upstream: trainer/connectors/signal_connector.py, lines 45 and 108;
    loops/training_epoch_loop.py, lines 259 and 300.
    """
    signals: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    signals.register_signal_handlers = _do_nothing
    loop._broadcast_sigterm_tensor = _do_nothing


def _do_nothing(*_: Any) -> None:
    """Replace a method of Lightning."""


def replace_results(trainer: L.Trainer) -> None:
    """Collect the logged metrics when they are logged, not again at every later step, and count samples as floats.

    Lightning reads the values of the progress bar at every step, and averages the numbers of samples over the ranks as
    integers, which rounds down. Upstream: trainer/connectors/logger_connector/result.py, lines 202 and 491;
    fabric/utilities/distributed.py, `_sync_ddp`.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    loop._results = _Results(training=True)
    for evaluation in (loop.val_loop, trainer.validate_loop, trainer.test_loop):
        evaluation._results = _Results(training=False)


class _Results(_ResultCollection):
    _cached_step_metrics: Any = None  # None after a value is logged

    def __setitem__(self, name: str, result: _ResultMetric) -> None:
        super().__setitem__(name, result)
        if "cumulated_batch_size" in result._defaults:
            result._defaults["cumulated_batch_size"] = torch.tensor(0.0)
            result.cumulated_batch_size = result.cumulated_batch_size.float()

    def log(self, *args: Any, **kwargs: Any) -> None:
        self._cached_step_metrics = None
        super().log(*args, **kwargs)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        self._cached_step_metrics = None
        super().reset(*args, **kwargs)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        self._cached_step_metrics = None
        return super().to(*args, **kwargs)

    def metrics(self, on_step: bool) -> Any:
        if not (on_step and self.training):
            return super().metrics(on_step)
        self._cached_step_metrics = self._cached_step_metrics or super().metrics(on_step)
        return self._cached_step_metrics


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
