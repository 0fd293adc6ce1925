"""A mean over samples of unequal weight, exact over any number of processes."""

import torch
from torch import Tensor
from torchmetrics import Metric


class WeightedMean(Metric):
    """The mean of values by weight, without a wait for the device.

    torchmetrics' own MeanMetric looks for NaN with each update, which waits; told not to
    (`nan_strategy="disable"`), its release 1.9 ignores the weights.
    """

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: Tensor, weights: Tensor) -> None:
        dtype = torch.promote_types(values.dtype, torch.float32)  # half precision would count to 256 and no further
        weights = weights.to(dtype)
        self.total = self.total.to(dtype) + (values.to(dtype) * weights).sum()
        self.weight = self.weight.to(dtype) + weights.sum()

    def compute(self) -> Tensor:
        return self.total / self.weight
