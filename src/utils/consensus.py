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

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._steps, self._left = 1, 1
        self._since = time.monotonic()

    def poll(self, trainer: L.Trainer, ask: Callable[[], int]) -> int:
        """Return the maximum of all ranks' answers when a poll is due, otherwise 0.

        Every rank must call this at every step.
        """
        self._left -= 1
        if self._left:
            return 0
        now = time.monotonic()
        rate = self._steps / max(now - self._since, 1e-6)
        wanted = min(max(1, int(rate * self._seconds)), 2 * self._steps, _MAX_INTERVAL)  # the first step tells little
        if trainer.world_size == 1:  # a tensor would make the host wait for the device
            self._since, self._steps, self._left = now, wanted, wanted
            return ask()
        answers = torch.tensor([ask(), -wanted], device=trainer.strategy.root_device)
        answer, steps = trainer.strategy.reduce(answers, reduce_op="max").tolist()
        self._since, self._steps, self._left = now, -steps, -steps
        return answer
