"""Private names of the loops of Lightning 2.6, and why there is no public one.

Lines are relative to https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/.
"""

from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector as CheckpointConnector
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector as LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from onecurve.patches import torchmetrics

__all__ = ["CheckpointConnector", "Closure", "ClosureResult", "LoggerConnector", "ResultMetric"]


def steps_of_loggers(trainer: L.Trainer) -> int:
    """Return the number of optimizer steps at which loggers log, while `global_step` adds those of all optimizers."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def set_steps_of_loggers(trainer: L.Trainer, steps: int) -> None:
    """Set that number, for which Lightning has no method: of a run that continues, or was trained elsewhere."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


def set_progress(trainer: L.Trainer, position: dict[str, Any]) -> None:
    """Let an evaluation log at the step and in the epoch of a position in training."""
    set_steps_of_loggers(trainer, position["steps"])
    trainer.fit_loop.epoch_progress.current.completed = position["epoch"] + (position["epoch_steps"] > 0)


def combination_mode(loaders: CombinedLoader) -> str:
    """Return the mode that a CombinedLoader was given."""
    return loaders._mode


def do_nothing(*_: Any) -> None:
    """Replace a method."""


def leave_signals_alone(trainer: L.Trainer) -> None:
    """Let a trainer neither handle signals, nor communicate at each step whether a rank received SIGTERM.

    Lightning's handler broadcasts wherever the signal interrupts the process, so ranks could wait for each other
    forever. `onecurve/run/stopping.py` handles signals. To replace the handler in `on_train_start` would be too late:
    it is active in the barrier and the sanity check before. (trainer/connectors/signal_connector.py, lines 45 and 108;
    loops/training_epoch_loop.py, lines 259 and 300)
    """
    signals: Any = trainer._signal_connector
    loop: Any = trainer.fit_loop.epoch_loop
    signals.register_signal_handlers = loop._broadcast_sigterm_tensor = do_nothing


class Optimization(_AutomaticOptimization):
    """Automatic optimization, which makes a closure for the optimizer of each batch."""

    def _make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        return self.make_closure(kwargs, optimizer, batch_idx)

    def make_closure(self, kwargs: Any, optimizer: Any, batch_idx: int) -> Closure:
        """Return a closure of one forward and one backward pass."""
        return super()._make_closure(kwargs, optimizer, batch_idx)

    # What the closure calls.
    forward_pass = _AutomaticOptimization._training_step
    backward_pass = _AutomaticOptimization._make_backward_fn
    reset_gradients = _AutomaticOptimization._optimizer_zero_grad
    call_on_before_zero_grad = _AutomaticOptimization._on_before_zero_grad


class ResultMetric(_ResultMetric):
    """A logged value, which moves to a device if it is not there.

    Lightning copies its options each time that a value is logged, in 0.2 ms (result.py, line 412;
    docs/benchmarks/speed.md).
    """

    def to(self, *args: Any, **kwargs: Any) -> Any:
        value = vars(self).get("value")  # a metric of the user's is there from its first update
        is_there = value is not None and args == (value.device,) and not kwargs
        return self if is_there else super().to(*args, **kwargs)


class ResultCollection(_ResultCollection):
    """The values that a loop has logged."""

    def __setitem__(self, name: str, result: Any) -> None:
        result.__class__ = ResultMetric
        super().__setitem__(name, result)

    @staticmethod
    def _get_cache(result: _ResultMetric, on_step: bool) -> Tensor | None:
        """Return a value; one of the progress bar stays on the CPU, or each reading would wait for the device."""
        value = torchmetrics.step_value(result)
        if on_step and result.meta.prog_bar and isinstance(value, Tensor):
            torchmetrics.set_step_value(result, value.cpu())
        return _ResultCollection._get_cache(result, on_step)


def results_of(loop: Any) -> Any:
    """Return the values that a loop has logged; public are copies of them only, reduced over the ranks."""
    return loop._results


def current_results(trainer: Any) -> Any:
    """Return the values that the loop which runs has logged."""
    return trainer._results


def replace_parts(
    trainer: L.Trainer,
    optimization: type[Optimization],
    make_results: Callable[[bool], ResultCollection],
    checkpoints: type[CheckpointConnector],
    logging: type[LoggerConnector],
) -> None:
    """Replace parts of a trainer, whose constructor makes them; `make_results` is told whether they are of training."""
    loop: Any = trainer.fit_loop.epoch_loop
    loop.automatic_optimization.__class__ = optimization
    loop._results = make_results(True)
    for evaluation in (loop.val_loop, trainer.validate_loop, trainer.test_loop):
        evaluation._results = make_results(False)
    trainer._checkpoint_connector.__class__ = checkpoints
    trainer._logger_connector.__class__ = logging
