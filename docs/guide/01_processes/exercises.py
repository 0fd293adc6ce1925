"""Exercises of chapter 1. Replace each `raise`, then run `python -m docs.guide.check 1`."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from docs.guide.experiment import run_ranks


def ring_all_gather(own: Tensor) -> list[Tensor]:
    """Return the vectors of all ranks, in the order of the ranks, with messages to the right neighbor only.

    Args:
        own: the vector of this rank; the vectors of all ranks have the same length.
    """
    raise NotImplementedError("Pass on what you received last, N - 1 times: dist.isend to the right, dist.recv.")


def latency_and_bandwidth(ranks: int, small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """Return the latency in seconds and the bandwidth in bytes per second of a link.

    Args:
        ranks: the number of processes in the ring.
        small: the bytes of a tensor and the seconds that its ring all-reduce took.
        large: the same for a larger tensor.
    """
    raise NotImplementedError("Each measurement is an equation: seconds = 2(N-1) (latency + bytes / (N bandwidth)).")


def check_ring_all_gather(solution: Callable[[Tensor], list[Tensor]]) -> None:
    expected = [[0.0, 0.5], [1.0, 1.5], [2.0, 2.5]]
    for rank, (vectors, receivers) in enumerate(run_ranks(_gather_and_record, 3, solution)):
        got = [vector.tolist() for vector in vectors]
        assert got == expected, f"rank {rank}: got {got}, expected {expected}"
        assert receivers == [(rank + 1) % 3] * 2, f"rank {rank}: sent to {receivers}, not twice to its right neighbor"


def _gather_and_record(solution: Callable[[Tensor], list[Tensor]]) -> tuple[list[Tensor], list[int]]:
    """Return what the solution returns, and the ranks to which it has sent."""
    receivers, send, isend = [], dist.send, dist.isend

    def recorded(function: Callable[..., object]) -> Callable[..., object]:
        def call(tensor: Tensor, dst: int, **options: object) -> object:
            receivers.append(dst)
            return function(tensor, dst, **options)

        return call

    dist.send, dist.isend = recorded(send), recorded(isend)
    return solution(torch.tensor([0.0, 0.5]) + dist.get_rank()), receivers


def check_latency_and_bandwidth(
    solution: Callable[[int, tuple[float, float], tuple[float, float]], tuple[float, float]],
) -> None:
    for ranks, latency, bandwidth in [(8, 1e-5, 12.5e9), (3, 1e-3, 1e9)]:
        measured = [(n, 2 * (ranks - 1) * (latency + n / (ranks * bandwidth))) for n in (9_600, 9_600_000)]
        got = solution(ranks, measured[0], measured[1])
        close = torch.allclose(torch.tensor(got), torch.tensor([latency, bandwidth]), rtol=1e-5)
        assert close, f"{ranks} ranks, {measured}: got {got}, expected {latency, bandwidth}"
