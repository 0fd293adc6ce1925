"""Means are exact in any precision of the module."""

import pytest
import torch

from src.models.module import WeightedMean


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_counts_beyond_the_range_of_half_precision(dtype: torch.dtype) -> None:
    """The metric has the module's type, as under Lightning; four of five of 10,000 samples are correct."""
    metric = WeightedMean().to(dtype)
    metric.reset()
    for _ in range(625):
        correct = (torch.arange(16) % 5 > 0).float()
        metric.update(correct, torch.ones(16, dtype=dtype))
    assert metric.weight == 10_000
    assert metric.compute() == pytest.approx(float((torch.arange(16) % 5 > 0).float().mean()), rel=1e-6)
