"""Exercises of chapter 5. Replace each `raise`, then run `python -m docs.guide.check 5`."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from docs.guide.experiment import run_ranks


def combine(counts: Tensor, means: Tensor, variances: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of the values of all ranks.

    Args:
        counts: (ranks,) numbers of values, which differ.
        means: (ranks,) means of these values.
        variances: (ranks,) biased variances: mean squared distances to the rank's own mean.
    """
    raise NotImplementedError("The variance within the ranks, and the variance of their means.")


def average_statistics(norm: nn.BatchNorm2d) -> None:
    """Replace the running mean and variance, in place, by their means over the ranks.

    Each rank normalizes its own group of images, so its running statistics know this group only.
    """
    raise NotImplementedError("Two all-reduces. Take no step count for a statistic.")


def check_combine(solution: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    values = torch.arange(12, dtype=torch.float64).square() + 1e3
    parts = values.split([2, 3, 7])
    got = solution(
        torch.tensor([2.0, 3.0, 7.0], dtype=torch.float64),
        torch.stack([part.mean() for part in parts]),
        torch.stack([part.var(unbiased=False) for part in parts]),
    )
    for name, one, other in zip(("mean", "variance"), got, (values.mean(), values.var(unbiased=False)), strict=True):
        assert torch.allclose(one, other), f"2, 3 and 7 values: the {name} is {one}, expected {other}"


def check_average_statistics(solution: Callable[[nn.BatchNorm2d], None]) -> None:
    # After one step, momentum 0.1 has moved 0 to 0.1 * mean, and 1 to 0.9 + 0.1 * (unbiased variance).
    values = torch.arange(16.0).view(2, 4, 1, 2)
    mean = 0.1 * values.mean((1, 2, 3)).mean()
    var = 0.9 + 0.1 * values.flatten(1).var(1).mean()
    for got in run_ranks(_train_one_step, 2, solution):
        expected = torch.stack([mean, var, torch.tensor(1.0)])
        assert torch.allclose(got, expected), f"running mean, variance, steps: got {got}, expected {expected}"


def _train_one_step(solution: Callable[[nn.BatchNorm2d], None]) -> Tensor:
    norm = nn.BatchNorm2d(1)
    norm(torch.arange(16.0).view(2, 4, 1, 2, 1)[dist.get_rank()])
    solution(norm)
    return torch.stack([buffer.flatten()[0] for buffer in norm.buffers()])
