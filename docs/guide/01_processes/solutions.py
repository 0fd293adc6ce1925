"""Solutions of the exercises of chapter 1."""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_gather(own: Tensor) -> list[Tensor]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    vectors = [own for _ in range(ranks)]
    for step in range(ranks - 1):
        incoming = torch.empty_like(own)
        sending = dist.isend(vectors[rank - step], (rank + 1) % ranks)
        dist.recv(incoming, (rank - 1) % ranks)
        sending.wait()
        vectors[rank - step - 1] = incoming
    return vectors


def latency_and_bandwidth(ranks: int, small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    (small_bytes, small_seconds), (large_bytes, large_seconds) = small, large
    messages = 2 * (ranks - 1)
    bandwidth = (large_bytes - small_bytes) / ranks / ((large_seconds - small_seconds) / messages)
    return small_seconds / messages - small_bytes / ranks / bandwidth, bandwidth
