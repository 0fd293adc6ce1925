"""Steps at which training metrics are logged, and the counts of steps.

There are several counts of steps: `trained_steps` here is that of the run; `trainer.global_step` counts the steps of
all optimizers together; `steps_of_loggers` of `patches/lightning_loops.py` is the step at which Lightning logs, also a
test; and `logged_steps` of `records/events.py` is read from metrics.csv, without a trainer. A row of metrics.csv has
the number of its step counted from zero; that of an evaluation after training has the number of all steps.
"""

import lightning as L

_LAST_CHECKED = 256  # step


def trained_steps(trainer: L.Trainer) -> int:
    """Return the number of steps that the run has trained; zero in a process that only evaluates."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed


def is_log_point(trainer: L.Trainer, step: int) -> bool:
    """Return whether training metrics are logged at an optimizer step: the first, the last, and each interval's end.

    Steps count from one: `trained_steps` after a step, one more before it. `LoopChanges` sets `last_step`.
    """
    return step % trainer.log_every_n_steps == 0 or step == 1 or step == getattr(trainer, "last_step", None)


def is_checked_step(step: int) -> bool:
    """Return whether checks that only some batches fail are due after a step: the steps 1, 2, 4, 8, ..., 256."""
    return step <= _LAST_CHECKED and step & (step - 1) == 0


def is_compared_step(trainer: L.Trainer) -> bool:
    """Return whether the current step is compared with another computation of it: a checked one, or a log point."""
    step = trained_steps(trainer) + 1
    return is_checked_step(step) or is_log_point(trainer, step)
