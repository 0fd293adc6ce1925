"""Solutions of the exercises of chapter 0."""

import time
from collections.abc import Callable
from concurrent.futures import Future


def conv_flops(images: int, channels: tuple[int, int], kernel: int, size: int, stride: int) -> int:
    outputs = images * channels[1] * (size // stride) ** 2
    forward = 2 * outputs * channels[0] * kernel**2
    return 3 * forward


def mean_seconds(submit: Callable[[], Future[None]], steps: int) -> float:
    submit().result()
    start = time.perf_counter()
    for step in [submit() for _ in range(steps)]:
        step.result()
    return (time.perf_counter() - start) / steps
