"""Exercises of chapter 12. Replace each `raise`, then run `python -m docs.guide.check 12`."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from docs.guide.experiment import run_ranks


def run_time(times: Tensor, period: int) -> float:
    """Return the time of a run whose ranks wait for each other after every `period` steps, and after the last one.

    Args:
        times: (steps, ranks) computing times.
        period: 1 for data parallelism, more for local SGD.
    """
    raise NotImplementedError("Between two waits, the slowest rank counts.")


def find_straggler(waiting: float) -> int:
    """Return the number of the slow rank, on every rank.

    Args:
        waiting: the seconds that this rank waited in collectives.
    """
    raise NotImplementedError("The slow rank waits least, as all others wait for it. Use dist.all_gather.")


def check_run_time(solution: Callable[[Tensor, int], float]) -> None:
    times = torch.tensor([[1.0, 3.0], [3.0, 1.0], [1.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    for period, expected in [(1, 11), (2, 9), (3, 8), (5, 8), (10, 8)]:
        got = float(solution(times, period))
        assert abs(got - expected) < 1e-6, f"period {period}: got {got}, expected {expected}"


def check_find_straggler(solution: Callable[[float], int]) -> None:
    for rank, got in enumerate(run_ranks(_wait, 4, solution)):
        assert got == 2, f"rank {rank}: got {got}, expected 2"


def _wait(solution: Callable[[float], int]) -> int:
    return solution([20.5, 21.0, 0.5, 20.0][dist.get_rank()])
