"""The comparison of the ranks; test_timeline.py checks it in runs."""

from types import SimpleNamespace
from typing import Any

import torch

from src.callbacks.ranks import RankComparison


def test_memory_of_a_long_run_is_limited_to_the_newest_log_points() -> None:
    def compare(slow: int, log_points: int) -> None:
        gathered = torch.tensor([[0.2 if rank == slow else 0.1, 0.2, 100.0] for rank in range(3)])
        strategy = SimpleNamespace(root_device=torch.device("cpu"), all_gather=lambda own: gathered)
        trainer: Any = SimpleNamespace(strategy=strategy)
        for _ in range(log_points):
            ranks.compare(trainer, SimpleNamespace(busy_seconds=0.1, seconds=0.2), memory_mib=100.0)

    ranks = RankComparison()
    compare(slow=0, log_points=1500)
    compare(slow=1, log_points=1000)
    assert str(ranks.summary()).strip().startswith("rank 1 is the slowest: it works 200.0 ms per step")
