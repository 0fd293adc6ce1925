"""The comparison of the ranks; test_timeline.py checks it in runs."""

from types import SimpleNamespace
from typing import Any

import torch

from src.engine.observe.ranks import RankComparison


def compare(ranks: RankComparison, busy: list[float], log_points: int) -> None:
    """Compare ranks that work for `busy` seconds of a step of 0.2 s."""
    gathered = torch.tensor([[seconds, 0.2, 100.0] for seconds in busy])
    strategy = SimpleNamespace(root_device=torch.device("cpu"), all_gather=lambda own: gathered)
    trainer: Any = SimpleNamespace(strategy=strategy)
    for _ in range(log_points):
        ranks.compare(trainer, SimpleNamespace(busy_seconds=busy[0], seconds=0.2), memory_mib=100.0)


def test_memory_of_a_long_run_is_limited_to_the_newest_log_points() -> None:
    ranks = RankComparison()
    compare(ranks, [0.2, 0.1, 0.1], log_points=1500)
    compare(ranks, [0.1, 0.2, 0.1], log_points=1000)
    assert str(ranks.summary()).strip().startswith("rank 1 is the slowest: it works 200.0 ms per step")


def test_names_no_rank_if_all_are_about_equally_slow() -> None:
    ranks = RankComparison()
    compare(ranks, [0.195, 0.19, 0.19], log_points=10)
    assert ranks.summary() is None
