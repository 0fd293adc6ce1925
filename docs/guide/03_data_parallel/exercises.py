"""Exercises of chapter 3. Replace each `raise`, then run `python -m docs.guide.check 3`."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from docs.guide.experiment import run_ranks


def weighted_average(gradient: Tensor, images: int) -> Tensor:
    """Return the gradient of the mean loss over the images of all ranks.

    Args:
        gradient: that of the mean loss over this rank's images.
        images: the number of this rank's images, which differs from rank to rank.
    """
    raise NotImplementedError("Use dist.all_reduce, and mind that the mean of means is not the mean.")


def exposed_time(backward: float, buckets: int, all_reduce: float) -> float:
    """Return the time from the start of backward until all gradients are averaged.

    Buckets are of equal size. Backward fills one after each `backward / buckets` seconds. The link sends one bucket
    at a time, in `all_reduce / buckets` seconds, while backward goes on.
    """
    raise NotImplementedError("Find when each bucket starts: it waits for its gradients and for the link.")


def check_weighted_average(solution: Callable[[Tensor, int], Tensor]) -> None:
    for result in run_ranks(_average_of_two, 2, solution):
        expected = torch.tensor([1.0, 5.0]) * 3 / 4 + torch.tensor([2.0, -3.0]) / 4
        assert torch.allclose(result, expected), f"3 images and 1 image: got {result}, expected {expected}"


def _average_of_two(solution: Callable[[Tensor, int], Tensor]) -> Tensor:
    return solution(*((torch.tensor([1.0, 5.0]), 3), (torch.tensor([2.0, -3.0]), 1))[dist.get_rank()])


def check_exposed_time(solution: Callable[[float, int, float], float]) -> None:
    for backward, buckets, all_reduce, expected in [
        (30, 1, 14, 44),
        (30, 10, 14, 31.4),
        (30, 10, 60, 63),
        (8, 4, 8, 10),
    ]:
        got = solution(backward, buckets, all_reduce)
        assert abs(got - expected) < 1e-9, f"{backward, buckets, all_reduce}: got {got}, expected {expected}"
