"""Exercises of chapter 4. Replace each `raise`, then run `python -m docs.guide.check 4`."""

from collections.abc import Callable

import torch
from torch import Tensor


def weighted_loss(losses: list[Tensor], images: int, devices: int) -> Tensor:
    """Return the mean loss of a batch from the mean losses of the replicas.

    Computing the loss in the replicas saves the first device the logits of all images.

    Args:
        losses: a mean for each replica that has got images.
        images: those of the batch. DataParallel scatters them by `x.chunk(devices)`.
        devices: the number of devices.
    """
    raise NotImplementedError("Try torch.arange(10).chunk(4): the parts differ in size.")


def forward_time(launch: float, compute: float, devices: int) -> float:
    """Return the time until the forward passes of all replicas are done.

    One thread after the other runs the Python code of its replica, since there is one interpreter: it takes `launch`
    seconds each. A device starts as soon as its thread does, and needs `compute` seconds, but is not done before its
    thread is.
    """
    raise NotImplementedError("When does the last thread start?")


def check_weighted_loss(solution: Callable[[list[Tensor], int, int], Tensor]) -> None:
    for images, devices in [(24, 3), (10, 4), (5, 4)]:
        each = torch.randn(images, generator=torch.Generator().manual_seed(0)) ** 2
        got = solution([part.mean() for part in each.chunk(devices)], images, devices)
        assert torch.allclose(got, each.mean()), f"{images} images, {devices} devices: got {got}, not {each.mean()}"


def check_forward_time(solution: Callable[[float, float, int], float]) -> None:
    for launch, compute, devices, expected in [(10, 30, 1, 30), (10, 30, 8, 100), (10, 5, 8, 80), (0, 30, 8, 30)]:
        got = solution(launch, compute, devices)
        assert abs(got - expected) < 1e-9, f"{launch, compute, devices}: got {got}, expected {expected}"
