"""Exercises of chapter 0. Replace each `raise`, then run `python -m docs.guide.check 0`."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def conv_flops(images: int, channels: tuple[int, int], kernel: int, size: int, stride: int) -> int:
    """Return the operations of a convolution in forward and backward, whose input needs a gradient, too.

    Args:
        images: the number of images.
        channels: those of the input and of the output.
        kernel: the filter has kernel x kernel places; it is odd.
        size: the images have size x size places, with zeros around them: padding=kernel // 2.
        stride: the output has (size / stride) x (size / stride) places.
    """
    raise NotImplementedError("Each number of the output is a sum of products; backward has two such computations.")


def mean_seconds(submit: Callable[[], Future[None]], steps: int) -> float:
    """Return the mean time of a step on a device that works through a queue.

    Args:
        submit: puts a step into the queue and returns at once; `.result()` of what it returns waits for the step. The
            very first step takes longer, since the device warms up, and does not count.
        steps: the number of steps that count.
    """
    raise NotImplementedError("Start and stop the clock only when the queue is empty.")


def check_conv_flops(solution: Callable[[int, tuple[int, int], int, int, int], int]) -> None:
    for images, channels, kernel, size, stride in [(1, (3, 8), 3, 8, 1), (24, (8, 16), 5, 8, 2)]:
        layer = nn.Conv2d(*channels, kernel, stride, padding=kernel // 2)
        x = torch.randn(images, channels[0], size, size, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        got, expected = solution(images, channels, kernel, size, stride), counter.get_total_flops()
        assert got == expected, f"{images, channels, kernel, size, stride}: got {got}, torch counts {expected}"


def check_mean_seconds(solution: Callable[[Callable[[], Future[None]], int], float]) -> None:
    durations = iter([1.0, *[0.02] * 50])
    with ThreadPoolExecutor(max_workers=1) as device:
        got = solution(lambda: device.submit(time.sleep, next(durations)), 5)
    assert got > 0.019, f"got {got:.4f} seconds: steps of 0.02 seconds were still running when the clock was stopped"
    assert got < 0.15, f"got {got:.4f} seconds: the first step counts, or was still running when the clock was started"
