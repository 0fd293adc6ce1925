"""Steps at which training metrics are logged, and decisions that all ranks take at the same step.

There are several counts of steps: `trained_steps` here is that of the run; `trainer.global_step` counts the steps of
each optimizer; `steps_of_loggers` of `patches/lightning_loops.py` is the step at which Lightning logs, also a test; and
`logged_steps` of `records/events.py` is read from metrics.csv, without a trainer.
"""

import time
from collections.abc import Callable

import lightning as L
import torch

_LAST_CHECKED = 256  # step
_MAX_INTERVAL = 200  # steps between two polls; a larger number would delay a poll if steps become slower


def trained_steps(trainer: L.Trainer) -> int:
    """Return the number of steps that the run has trained; zero in a process that only evaluates."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed


def is_log_point(trainer: L.Trainer, step: int) -> bool:
    """Return whether training metrics are logged at an optimizer step: the first, the last, and each interval's end.

    Args:
        trainer: `log_every_n_steps` is the interval, and `last_step` the last step, which `LoopChanges` sets.
        step: number of the step, counted from one: `trained_steps` after the step, one more before it.
    """
    return step % trainer.log_every_n_steps == 0 or step == 1 or step == getattr(trainer, "last_step", None)


def is_checked_step(step: int) -> bool:
    """Return whether checks that only some batches fail are due after a step: the steps 1, 2, 4, 8, ..., 256."""
    return step <= _LAST_CHECKED and step & (step - 1) == 0


def is_compared_step(trainer: L.Trainer) -> bool:
    """Return whether the current step is compared with another computation of it: a checked one, or a log point."""
    step = trained_steps(trainer) + 1
    return is_checked_step(step) or is_log_point(trainer, step)


class RankConsensus:
    """Polls all ranks about once a second, because a collective at every step would slow training down.

    Each poll also sets the number of steps to the next one, so that all ranks poll at the same step although their
    clocks differ.
    """

    def __init__(self) -> None:
        self._interval = self._steps_left = 1  # steps from the last poll to the next one, and those left
        self._last_poll = time.monotonic()

    def poll(self, trainer: L.Trainer, ask: Callable[[], int]) -> int:
        """Return the maximum of all ranks' answers when a poll is due, otherwise 0.

        Every rank must call this at every step.
        """
        self._steps_left -= 1
        if self._steps_left:
            return 0
        now = time.monotonic()
        steps_per_second = self._interval / max(now - self._last_poll, 1e-6)
        # At most double, because the first step is not typical.
        interval = min(max(1, int(steps_per_second)), 2 * self._interval, _MAX_INTERVAL)
        if trainer.world_size == 1:  # a tensor would make the host wait for the device
            answer = ask()
        else:
            answers = torch.tensor([ask(), -interval], device=trainer.strategy.root_device)
            answer, negative_interval = trainer.strategy.reduce(answers, reduce_op="max").tolist()
            interval = -negative_interval  # the shortest of all ranks
        self._last_poll, self._interval, self._steps_left = now, interval, interval
        return answer
