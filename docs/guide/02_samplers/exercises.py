"""Exercises of chapter 2. Replace each `raise`, then run `python -m docs.guide.check 2`."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

from docs.guide.experiment import run_ranks


def positions(length: int, ranks: int, rank: int, epoch: int) -> list[int]:
    """Return the positions that `DistributedSampler(data, ranks, rank, seed=0)` yields in an epoch.

    Args:
        length: the number of samples of `data`, at least that of the ranks.
    """
    raise NotImplementedError("The order is torch.randperm from a generator seeded with the epoch; then pad, then cut.")


def exact_mean(losses: Tensor, images: int) -> float:
    """Return the mean loss of all images on every rank, without the padding.

    Args:
        losses: those of the positions rank, rank + N, rank + 2N, ... of the padded set, on N ranks.
        images: the number of images in the set; the padding stands behind them.
    """
    raise NotImplementedError(
        "Some ranks have losses of padding at their end: leave them out, then use dist.all_reduce."
    )


def check_positions(solution: Callable[[int, int, int, int], list[int]]) -> None:
    for length, ranks, epoch in [(12, 3, 0), (50, 3, 0), (50, 8, 4)]:
        for rank in range(ranks):
            sampler: DistributedSampler[int] = DistributedSampler(range(length), ranks, rank, seed=0)
            sampler.set_epoch(epoch)
            got, expected = list(solution(length, ranks, rank, epoch)), list(sampler)
            assert got == expected, f"{length, ranks, rank, epoch}: got {got}, expected {expected}"


def check_exact_mean(solution: Callable[[Tensor, int], float]) -> None:
    for images in (4, 5, 6):
        for rank, got in enumerate(run_ranks(_mean_of_squares, 3, solution, images)):
            expected = sum(position**2 for position in range(images)) / images
            assert abs(got - expected) < 1e-9, f"{images} images, rank {rank}: got {got}, expected {expected}"


def _mean_of_squares(solution: Callable[[Tensor, int], float], images: int) -> float:
    """Image p has a loss of p squared, and the padding repeats the first images."""
    padded = [position % images for position in range(6)]
    return float(solution(torch.tensor(padded, dtype=torch.float64)[dist.get_rank() :: 3] ** 2, images))
