"""Exercises of chapter 7. Replace each `raise`, then run `python -m docs.guide.check 7`."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from docs.guide.experiment import run_ranks


def bytes_per_rank(parameters: float, ranks: int, stage: int) -> float:
    """Return the bytes of weights, gradients and optimizer state on a rank, with Adam in mixed precision.

    Args:
        parameters: their number; each has 2 bytes of weight, 2 of gradient, and 12 of optimizer state (a copy of the
            weight and two moments in float32).
        ranks: the number of ranks.
        stage: that of ZeRO. 0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also the weights.
    """
    raise NotImplementedError("Divide by the ranks what the stage shards.")


def mean_shard(gradient: Tensor) -> Tensor:
    """Return this rank's shard of the mean of the gradients of all ranks.

    Args:
        gradient: a vector. Its length need not be a multiple of the number of ranks: zeros fill up the last shard.
    """
    raise NotImplementedError("Pad the vector with F.pad, then dist.reduce_scatter its chunks.")


def check_bytes_per_rank(solution: Callable[[float, int, int], float]) -> None:
    # The table of the ZeRO paper (Rajbhandari et al., 2020), figure 1: 7.5 billion parameters on 64 ranks, in GB.
    for stage, expected in enumerate([120, 31.4, 16.6, 1.88]):
        got = solution(7.5e9, 64, stage) / 1e9
        assert abs(got / expected - 1) < 0.005, f"stage {stage}: got {got:.2f} GB, expected {expected} GB"


def check_mean_shard(solution: Callable[[Tensor], Tensor]) -> None:
    expected = torch.tensor([[1.0, 3.0, 5.0], [7.0, 9.0, 11.0], [13.0, 0.0, 0.0]])
    for rank, result in enumerate(run_ranks(_shard_of_seven, 3, solution)):
        assert torch.allclose(result, expected[rank]), f"rank {rank}: got {result}, expected {expected[rank]}"


def _shard_of_seven(solution: Callable[[Tensor], Tensor]) -> Tensor:
    return solution(torch.arange(7.0) * 2 + dist.get_rank())
