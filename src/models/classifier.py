"""The LightningModule of image classification, the same for every strategy and any number of processes."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from src.checkpoint.integrity import check_fits
from src.data.batch import Batch
from src.models.metrics import WeightedMean
from src.models.module import Module
from src.models.views import average_over_views, check_views
from src.optim.groups import build_optimizer, override_hyperparameters, scaling_factor
from src.optim.schedulers import as_torch_schedule, check_same_kind, scheduler_config
from src.optim.schedules import lr_multiplier
from src.utils.compilation import compiled, should_compile
from src.utils.errors import UserError, suggest
from src.utils.log_points import is_log_point
from src.utils.recomputation import recompute_blocks

_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # with CUDA graphs
_RECOMPUTE = ("none", "blocks")
_COMPILE_MODES = ("default", "max-autotune-no-cudagraphs", *_GRAPH_MODES)


class ImageClassifier(Module):
    """Trains a network with cross-entropy on its logits.

    Args:
        net: network that maps (n, channels, height, width) images to (n, classes) logits. Its parameters have the
            prefix `net.` in checkpoints.
        optimizer: builds the optimizer from parameter groups; its `lr` is for a batch of `reference_batch_size`.
        schedule: maps (step, steps of the run) to the factor on the learning rate. If a finished run is extended, the
            schedule is that of the longer run. Or a scheduler of torch (`src/optim/schedulers.py`).
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

    Raises:
        UserError: if `label_smoothing`, `tta`, `compile` or `recompute` is not valid.
    """

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
        if not 0 <= label_smoothing <= 1:
            raise UserError(f"module.label_smoothing={label_smoothing}: give a fraction between 0 and 1")
        check_views(tta)
        if isinstance(compile, str) and compile not in _COMPILE_MODES:
            raise UserError(f"module.compile={compile}: give true, false or a mode: {suggest(compile, _COMPILE_MODES)}")
        if recompute not in _RECOMPUTE:
            raise UserError(f"module.recompute={recompute}: {suggest(str(recompute), _RECOMPUTE)}")
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
        self._step_sums: Tensor | None = None  # sums of loss and correct samples over the step's micro-batches
        self.rank_loss: float | None = None  # at the newest log point; `train/loss` is its mean over the ranks

    def setup(self, stage: str) -> None:
        for metric in (self.mean_loss, self.accuracy, self.accuracy_tta):
            # A spawned process shares tensors with its parent; the reset allocates its own.
            metric.reset()
        if self.should_compile and not self._is_compiled:
            # Dynamo skips the file of nn.Sequential, so `net.compile()` would compile its layers one by one. The blocks
            # become a part of the graph of the network, unless FSDP's hooks break it at each block.
            for part in (self.net, *self.net.children()):
                part.forward = torch.compile(part.forward, mode=self.compile_mode)
            self._is_compiled = True

    def forward(self, image: Tensor) -> Tensor:
        """Map (n, channels, height, width) images to (n, classes) logits."""
        logits = self.net(image.contiguous(memory_format=self.memory_format))
        # The next replay of a CUDA graph overwrites its output, and test-time augmentation needs several.
        return logits.clone() if self.compile_mode in _GRAPH_MODES else logits

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the samples' losses times `batch.weight`, from (n, classes) logits; it has no side effects.

        The weights of a training batch make it the mean.
        """
        weighted_loss = compiled(_weighted_loss) if should_compile(self.should_compile, outputs) else _weighted_loss
        return weighted_loss(outputs, batch.target, batch.weight, self.label_smoothing)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self(batch.image)
        loss = self.loss(outputs, batch)
        if is_log_point(self.trainer, self.trainer.global_step + 1):
            self._log_step(loss.detach(), outputs.detach(), batch, batch_idx)
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

        Raises:
            UserError: if the checkpoint is of another network, or another kind of optimizer or scheduler.
        """
        check_fits(checkpoint["state_dict"], self.state_dict())
        if not self.trainer.training or not checkpoint.get("optimizer_states"):
            return
        own: Any = self.configure_optimizers()
        optimizer, scheduler = own["optimizer"], own["lr_scheduler"]["scheduler"]
        check_same_kind(checkpoint.get("scheduler", "LambdaLR"), scheduler)  # earlier versions had no other
        if as_torch_schedule(self.schedule):
            return
        step, steps = checkpoint["global_step"], self.trainer.datamodule.total_steps
        saved = checkpoint["optimizer_states"][0]
        override_hyperparameters(saved, optimizer, lambda group: lr_multiplier(self.schedule, group, step, steps))
        # The scheduler takes the learning rates from the configuration, not from the checkpoint.
        for key in ("base_lrs", "_last_lr"):
            checkpoint["lr_schedulers"][0].pop(key)

    def _evaluate(self, outputs: Tensor, batch: Batch, stage: str) -> None:
        self.mean_loss.update(_losses(outputs, batch.target, self.label_smoothing), batch.weight)
        self.accuracy.update(_correct(outputs, batch), batch.weight)
        self.log(f"{stage}/loss", self.mean_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log(f"{stage}/acc", self.accuracy, on_step=False, on_epoch=True, prog_bar=True)

    def _log_step(self, loss: Tensor, outputs: Tensor, batch: Batch, batch_idx: int) -> None:
        """Log the mean over the global batch of a step: sum over micro-batches, then reduce once over ranks."""
        sums = torch.stack([loss, (_correct(outputs, batch) * batch.weight).sum()])
        self._step_sums = sums if self._step_sums is None else self._step_sums + sums
        micro_batches = self.trainer.accumulate_grad_batches
        if (batch_idx + 1) % micro_batches:
            return
        own = self._step_sums / micro_batches
        # The progress bar needs the values on the CPU. One copy has those of all ranks, and those of this rank.
        means, own = torch.stack([self.trainer.strategy.reduce(own.clone(), reduce_op="mean"), own]).cpu()
        self.rank_loss, self._step_sums = float(own[0]), None
        self.log("train/loss", means[0], prog_bar=True)
        self.log("train/acc", means[1])
        # Lightning would copy a Python number to the GPU, and back when it writes the log.
        self.log("lr", torch.tensor(self.trainer.optimizers[0].param_groups[0]["lr"]))


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
