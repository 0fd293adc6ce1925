"""A weighted mean over samples, exact for any number of processes."""

import torch
from torch import Tensor
from torchmetrics import Metric

from src.utils.tensors import upcast_half


class WeightedMean(Metric):
    """The weighted mean of values, without a host-device synchronization.

    torchmetrics' own MeanMetric checks for NaN at each update, which synchronizes. `nan_strategy="disable"` turns the
    check off, but torchmetrics 1.9 then ignores the weights.
    """

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor) -> None:
        """Add (n,) values with their (n,) weights."""
        values = upcast_half(values)  # a bfloat16 sum of ones stops at 256
        weights = weights.to(values.dtype)
        self.total = self.total.to(values.dtype) + (values * weights).sum()
        self.weight = self.weight.to(values.dtype) + weights.sum()

    def compute(self) -> Tensor:
        return self.total / self.weight
