"""Decisions that all ranks take at the same step."""

import time
from collections.abc import Callable

import lightning as L
import torch

_MAX_INTERVAL = 200  # steps between two polls; a larger number would delay a poll if steps become slower


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
