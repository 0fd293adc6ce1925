"""Comparison of the ranks: how long each works in a step, and how much memory it needs.

Ranks that train in lockstep take equally long for a step, because the fast ones wait for the slow ones in collectives.
A slow rank is therefore found by its busy time, the time of a step in which it does not wait.
"""

import math
from collections import deque
from statistics import median, median_low
from typing import Any

import lightning as L
import torch

_MIN_GAIN = 0.05  # fraction of a step; below it, ranks differ by chance
_MIN_LOG_POINTS = 3
_MAX_LOG_POINTS = 1000  # the newest ones: 100,000 of 64 ranks would take 200 MiB in each process


class RankComparison:
    """The recorded steps of all ranks at the newest log points of a run."""

    def __init__(self) -> None:
        self._busy: deque[list[float]] = deque(maxlen=_MAX_LOG_POINTS)  # seconds of each rank, by log point
        self._steps: deque[float] = deque(maxlen=_MAX_LOG_POINTS)  # seconds of the step, by log point

    def compare(self, trainer: L.Trainer, recorded: Any, memory_mib: float) -> dict[str, float]:
        """Gather the measurements of all ranks at a log point. Every rank must call it.

        Args:
            trainer: the trainer, in training.
            recorded: the `RecordedStep` of this rank, or None if no step was recorded.
            memory_mib: peak memory of this rank.

        Returns:
            Metrics `ranks/...`; with one process only `memory_mib_max`. `slowest` is the rank with the most busy time,
            and `gain` the fraction of a step that would be saved if it were as fast as the median of all ranks.
        """
        busy, step = (recorded.busy_seconds, recorded.seconds) if recorded else (math.nan, math.nan)
        own = torch.tensor([busy, step, memory_mib], device=trainer.strategy.root_device)
        gathered = trainer.strategy.all_gather(own).view(-1, 3).cpu().tolist()
        busy_of, step_of, memory_of = map(list, zip(*gathered, strict=True))
        metrics = {"memory_mib_max": max(memory_of)}
        if len(gathered) > 1:
            metrics["memory_mib_min"] = min(memory_of)
            if not any(map(math.isnan, busy_of)):
                self._busy.append(busy_of)
                self._steps.append(max(step_of))
                metrics |= _busy_metrics(busy_of, max(step_of))
        return metrics

    def summary(self) -> str | None:
        """Return a message that names the slowest rank, by the medians of the log points, if others wait for it."""
        if len(self._busy) < _MIN_LOG_POINTS:
            return None
        metrics = _busy_metrics([median(busy) for busy in zip(*self._busy, strict=True)], median(self._steps))
        if metrics["gain"] < _MIN_GAIN:
            return None
        return (
            f"  rank {metrics['slowest']:.0f} is the slowest: it works {metrics['busy_ms_max']:.1f} ms per step, "
            f"the median rank {metrics['busy_ms_median']:.1f} ms;\n"
            f"  if it were as fast as the median, a step would be {metrics['gain']:.0%} shorter"
        )


def _busy_metrics(busy: list[float], step: float) -> dict[str, float]:
    """Return metrics of the seconds in which each rank works, in a step of `step` seconds.

    Of an even number of ranks, the median is the lower of the two in the middle.
    """
    typical, longest = median_low(busy), max(busy)
    return {
        "busy_ms_max": 1000 * longest,
        "busy_ms_median": 1000 * typical,
        "slowest": float(busy.index(longest)),
        "gain": (longest - typical) / step if step else 0.0,
    }
