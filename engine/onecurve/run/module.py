"""The base class of the LightningModules of this template, and its metric; a module of one's own needs none of it."""

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from onecurve.network.precision import scales_loss
from onecurve.network.tensors import upcast_half
from onecurve.observe.steps import is_log_point, trained_steps


class Module(L.LightningModule):
    """A LightningModule whose steps take a `Batch`, and whose training metrics are means over the global batch.

    Attributes:
        takes_batch: the steps then get a `Batch`; those of any other module get what its loader yields.
    """

    takes_batch = True

    def setup(self, stage: str) -> None:
        """Reset each metric, in which a fit that failed may have left samples."""
        for part in self.modules():
            if isinstance(part, Metric):
                part.reset()

    @property
    def is_log_point(self) -> bool:
        """Whether the current step logs training metrics."""
        return is_log_point(self.trainer, trained_steps(self.trainer) + 1)

    def log_step(self, metrics: dict[str, Tensor]) -> None:
        """Log means of a training step over the global batch, as `self.log("train/loss", ...)`, and the learning rate.

        Args:
            metrics: sums over the samples of a batch times their weights, by name.
        """
        for name, value in metrics.items():
            self.log(name, value, prog_bar=name == "train/loss", sync_dist=True)
        # Lightning would copy a Python number to the GPU, and back when it writes the log.
        self.log("lr", torch.tensor(self.trainer.optimizers[0].param_groups[0]["lr"]))

    @property
    def allows_fused_optimizer(self) -> bool:
        """Whether the strategy and the precision of the run can use a fused optimizer.

        ZeRO keeps step counts on the CPU. A fused optimizer divides the gradients by the loss scale in its own step,
        and Lightning refuses to clip them before that.
        """
        shards_state = getattr(self.trainer.strategy, "shard_optimizer", False)
        clips_scaled = scales_loss(self.trainer.precision) and bool(self.trainer.gradient_clip_val)
        return not (shards_state or clips_scaled)


class WeightedMean(Metric):
    """The weighted mean of values over the samples of all processes, without a host-device synchronization.

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
