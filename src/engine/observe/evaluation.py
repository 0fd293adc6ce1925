"""Record what a classifier confuses, and how reliable its probabilities are."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from src.engine.determinism.batch import Batch
from src.engine.utils.errors import UserError
from src.engine.utils.files import atomic_write
from src.engine.utils.tensors import upcast_half

NUM_BINS = 15  # of Guo et al., "On calibration of modern neural networks" (2017)


class EvaluationSums:
    """Sums over the samples that this rank evaluates, on its device. No update waits for the device.

    torchmetrics' ConfusionMatrix and CalibrationError exclude padding by a boolean mask, which does wait.

    Attributes:
        confusion: (classes, classes) int64 numbers of samples; row: label, column: predicted class.
        bins: (15, 3): number of samples, sum of their probabilities, and number of correct predictions. A sample
            belongs to a bin by the probability of its predicted class; the bins have equal widths.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.long, device=device)
        self.bins = torch.zeros(NUM_BINS, 3, device=device)
        self._bin_edges = torch.linspace(0, 1, NUM_BINS + 1, device=device)[1:-1]

    def update(self, logits: Tensor, label: Tensor, weight: Tensor) -> None:
        """Add a batch.

        Args:
            logits: (n, classes).
            label: (n,) int64.
            weight: (n,), 1 for a sample and 0 for padding.
        """
        confidence, predicted = upcast_half(logits).softmax(1).max(1)
        self.confusion.view(-1).index_add_(0, label * len(self.confusion) + predicted, weight.long())
        weight = weight.to(confidence.dtype)
        is_correct = (predicted == label).to(confidence.dtype)
        rows = torch.stack([weight, weight * confidence, weight * is_correct], dim=1)
        number = torch.bucketize(confidence, self._bin_edges.to(confidence.dtype))
        self.bins = self.bins.to(confidence.dtype).index_add_(0, number, rows)


class Evaluation(L.Callback):
    """Writes `evaluation/val.json` and `evaluation/test.json` into the run folder after each validation and test.

    They contain the confusion matrix, and the calibration by 15 bins. Loggers with a method `log_evaluation` get the
    same. Each sample counts once for any number of processes.
    Metrics: `val/calibration_error` is the expected calibration error (Guo et al., "On calibration of modern neural
    networks", 2017), and `val_class/NAME` the accuracy of a class; those of the test begin with `test`.

    The module's `validation_step` and `test_step` return the (n, classes) logits of their batch.
    """

    def __init__(self) -> None:
        self._sums: EvaluationSums  # of the current evaluation
        self._loaded_step: int | None = None  # the step of the checkpoint that is tested, if one is loaded

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if not hasattr(data, "classes"):
            raise UserError(
                f"callbacks.evaluation is for classification, but {type(data.plain).__name__} has no `classes`, the "
                "names in the order of the labels: add them, or set callbacks.evaluation=null"
            )
        # A batch before training shows whether the module returns its logits.
        trainer.num_sanity_val_steps = trainer.num_sanity_val_steps or 1

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if not trainer.training:
            self._loaded_step = checkpoint["global_step"]

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = trainer.datamodule
        self._sums = EvaluationSums(len(data.classes), pl_module.device)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Add a batch: a Batch, or a pair of images and targets without the padding."""
        expected = (len(batch[0]), len(self._sums.confusion))
        if not isinstance(outputs, Tensor) or outputs.shape != expected:
            step = "test_step" if trainer.testing else "validation_step"
            raise UserError(
                f"callbacks.evaluation is for classification and needs logits: let {type(pl_module).__name__}.{step} "
                f"return them, an (images, classes) tensor, here {expected}; or set callbacks.evaluation=null"
            )
        weight = batch.weight if isinstance(batch, Batch) else torch.ones_like(batch[1])
        self._sums.update(outputs.detach(), batch[1], weight)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sum over the ranks, log the metrics, and write the file on rank zero. Every rank must call it."""
        data: Any = trainer.datamodule
        stage = "test" if trainer.testing else "val"
        copies = trainer.world_size // data.parallel.dp_size  # ranks of one pipeline evaluate the same samples
        confusion = trainer.strategy.reduce(self._sums.confusion, reduce_op="sum").cpu() // copies
        bins = trainer.strategy.reduce(self._sums.bins, reduce_op="sum").cpu().double() / copies
        calibration = _calibration(bins)
        per_class = zip(data.classes, confusion.diag().tolist(), confusion.sum(1).tolist(), strict=True)
        accuracies = {f"{stage}_class/{name}": correct / count for name, correct, count in per_class if count}
        metrics = {f"{stage}/calibration_error": calibration["error"]} | accuracies
        # Equal on all ranks; without the option Lightning warns of each.
        pl_module.log_dict({name: torch.tensor(value) for name, value in metrics.items()}, sync_dist=True)
        if trainer.sanity_checking or trainer.fast_dev_run or not trainer.is_global_zero:
            return
        # `global_step` is zero in a process that is spawned for the test.
        trained = trainer.global_step or trainer.fit_loop.epoch_loop._batches_that_stepped
        evaluation = {
            "step": trained if self._loaded_step is None else self._loaded_step,
            "classes": data.classes,
            "confusion": confusion.tolist(),
            "calibration": calibration,
        }
        file = Path(trainer.default_root_dir) / "evaluation" / f"{stage}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(evaluation))
        for logger in trainer.loggers:
            if hasattr(logger, "log_evaluation"):
                logger.log_evaluation(stage, evaluation)

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end


def _calibration(bins: Tensor) -> dict[str, Any]:
    """Return the expected calibration error and the bins, from their (15, 3) sums."""
    counts, confidences, correct = bins.unbind(1)
    rows = [
        {
            "count": round(count),
            "confidence": confidence / count if count else None,
            "accuracy": accurate / count if count else None,
        }
        for count, confidence, accurate in bins.tolist()
    ]
    return {"error": float((correct - confidences).abs().sum() / counts.sum()), "bins": rows}
