"""The LightningModule of image classification, the same for every strategy and any number of processes."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from onecurve import (
    GRAPH_MODES,
    Batch,
    Module,
    UserError,
    WeightedMean,
    build_optimizer,
    check_choice,
    check_compile_mode,
    check_fits,
    compile_blocks,
    compiled,
    keep_configured_rates,
    recompute_blocks,
    scaling_factor,
    scheduler_config,
    should_compile,
)
from src.models.views import VIEWS, average_over_views


class ImageClassifier(Module):
    """Trains a network with cross-entropy on its logits.

    Args:
        net: network that maps (n, channels, height, width) images to (n, classes) logits. Its parameters have the
            prefix `net.` in checkpoints.
        optimizer: builds the optimizer from parameter groups; its `lr` is for a batch of `reference_batch_size`.
        schedule: maps (step, steps of the run) to the factor on the learning rate. If a finished run is extended, the
            schedule is that of the longer run. Or a scheduler of torch (`onecurve/optim/schedules.py`).
        reference_batch_size: batch size for which the learning rate is given.
        lr_scaling: how the learning rate follows the batch size: `linear`, `sqrt` or `none`.
        label_smoothing: fraction of the target spread evenly over the classes (Szegedy et al., 2015).
        tta: test-time augmentation for `test/acc_tta`, the accuracy of logits averaged over views of each image:
            `mirror`, or `shift`, which adds shifts by one pixel; null for none.
        compile: compile the network's forward pass as one graph, in each process; parameter names do not change. Or
            the mode of torch.compile, such as `max-autotune`.
        channels_last: use the channels-last memory format for images and filters, with which convolutions are faster
            on CPUs and GPUs.
        recompute: `blocks` keeps only the input of each block of the network, and computes its activations again in
            the backward pass, which saves memory; `none` keeps all activations.
    """

    hardware_options = ("compile", "channels_last", "recompute", "tta")  # they change no curve

    def __init__(
        self,
        net: nn.Module,
        optimizer: partial[Optimizer],
        schedule: Any,
        reference_batch_size: int = 128,
        lr_scaling: str = "linear",
        label_smoothing: float = 0.0,
        tta: str | None = None,
        compile: bool | str = False,
        channels_last: bool = True,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        if tta is not None:
            check_choice("module.tta", tta, VIEWS)
        if not 0 <= label_smoothing <= 1:
            raise UserError(f"module.label_smoothing={label_smoothing}: give a fraction between 0 and 1")
        check_compile_mode("module.compile", compile)
        check_choice("module.recompute", recompute, ("none", "blocks"))
        if recompute == "blocks":
            if compile:
                raise UserError(f"module.compile={compile} and module.recompute=blocks exclude each other: unset one")
            recompute_blocks(net)
        self.net, self.tta, self.recompute = net, tta, recompute  # strategies that cannot recompute read the last
        has_convolutions = any(isinstance(module, nn.Conv2d) for module in net.modules())
        self.memory_format = torch.channels_last if channels_last and has_convolutions else torch.contiguous_format
        net.to(memory_format=self.memory_format)  # type: ignore[call-overload]
        self.optimizer, self.schedule = optimizer, schedule
        self.reference_batch_size, self.lr_scaling = reference_batch_size, lr_scaling
        self.label_smoothing = label_smoothing
        self.should_compile = bool(compile)  # strategies that cannot compile the network read it
        self.compile_mode = compile if isinstance(compile, str) else None
        self._is_compiled = False
        self.mean_loss, self.accuracy, self.accuracy_tta = WeightedMean(), WeightedMean(), WeightedMean()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.should_compile and not self._is_compiled:
            compile_blocks(self.net, self.compile_mode)
            self._is_compiled = True

    def forward(self, image: Tensor) -> Tensor:
        """Map (n, channels, height, width) images to (n, classes) logits."""
        logits = self.net(image.contiguous(memory_format=self.memory_format))
        # The next replay of a CUDA graph overwrites its output, and test-time augmentation needs several.
        return logits.clone() if self.compile_mode in GRAPH_MODES else logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the samples' losses times `batch.weight`, from (n, classes) logits; it has no side effects.

        The weights of a training batch make it the mean.
        """
        weighted_loss = compiled(_weighted_loss) if should_compile(self.should_compile, outputs) else _weighted_loss
        return weighted_loss(outputs, batch.target, batch.weight, self.label_smoothing)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self(batch.image)
        loss = self.loss(outputs, batch)
        if self.is_log_point:
            accuracy = (_correct(outputs.detach(), batch) * batch.weight).sum()
            self.log_step({"train/loss": loss, "train/acc": accuracy})
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the (n, classes) logits of the samples, for callbacks."""
        outputs = self(batch.image)
        self._evaluate(outputs, batch, "val")
        return outputs

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the (n, classes) logits of the samples, for callbacks."""
        outputs = self(batch.image)
        self._evaluate(outputs, batch, "test")
        if self.tta:
            averaged = average_over_views(self, batch.image, outputs, self.tta)
            self.accuracy_tta.update(_correct(averaged, batch), batch.weight)
            self.log("test/acc_tta", self.accuracy_tta, on_step=False, on_epoch=True)
        return outputs

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the (n, classes) class probabilities of the samples."""
        return self(batch.image).float().softmax(1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        data = self.trainer.datamodule
        factor = scaling_factor(self.lr_scaling, data.global_batch_size, self.reference_batch_size)
        optimizer = build_optimizer(self.net, self.optimizer, factor, "net.", self.allows_fused_optimizer)
        scheduler: Any = scheduler_config(optimizer, self.schedule, data.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.lr_scheduler_configs:  # a test has none
            checkpoint["scheduler"] = type(self.trainer.lr_scheduler_configs[0].scheduler).__name__

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another network; when training resumes, use the configured hyper-parameters.

        A scheduler of torch may have changed any of them, so that those of the checkpoint stay.
        """
        check_fits(checkpoint["state_dict"], self.state_dict())
        if self.trainer.training and checkpoint.get("optimizer_states"):
            keep_configured_rates(
                checkpoint, self.configure_optimizers(), self.schedule, self.trainer.datamodule.total_steps
            )

    def _evaluate(self, outputs: Tensor, batch: Batch, stage: str) -> None:
        self.mean_loss.update(_losses(outputs, batch.target, self.label_smoothing), batch.weight)
        self.accuracy.update(_correct(outputs, batch), batch.weight)
        self.log(f"{stage}/loss", self.mean_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log(f"{stage}/acc", self.accuracy, on_step=False, on_epoch=True, prog_bar=True)


def _losses(outputs: Tensor, target: Tensor, label_smoothing: float) -> Tensor:
    return F.cross_entropy(outputs, target, label_smoothing=label_smoothing, reduction="none")


def _weighted_loss(outputs: Tensor, target: Tensor, weight: Tensor, label_smoothing: float) -> Tensor:
    return (_losses(outputs, target, label_smoothing) * weight).sum()


def _correct(outputs: Tensor, batch: Batch) -> Tensor:
    """Return (n,) ones where the (n, classes) logits are greatest at the sample's class, and zeros elsewhere.

    The class of a mixed target, (n, classes), is the one with the greatest fraction.
    """
    label = batch.target.argmax(1) if batch.target.ndim == 2 else batch.target
    return (outputs.argmax(1) == label).float()
