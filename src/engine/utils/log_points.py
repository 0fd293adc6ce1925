"""The steps at which training metrics are logged."""

import lightning as L


def is_log_point(trainer: L.Trainer, step: int) -> bool:
    """Return whether training metrics are logged at an optimizer step: the first, the last, and each interval's end.

    Args:
        trainer: `log_every_n_steps` is the interval, and `last_step` the last step, which `OptimizerSteps` sets.
        step: number of the step, counted from one: `trainer.global_step` after the step, one more before it.
    """
    return step % trainer.log_every_n_steps == 0 or step == 1 or step == getattr(trainer, "last_step", None)
