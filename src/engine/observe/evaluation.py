"""Record what a classifier confuses, how reliable its probabilities are, and its most confident mistakes."""

import base64
import io
import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from PIL import Image
from torch import Tensor

from src.engine.determinism.batch import Batch
from src.engine.utils.errors import UserError
from src.engine.utils.files import atomic_write
from src.engine.utils.tensors import upcast_half

_log = logging.getLogger(__name__)


NUM_BINS = 15  # of Guo et al., "On calibration of modern neural networks" (2017)
MAX_MISTAKES = 64


class Mistakes(NamedTuple):
    """Wrong predictions in a fixed number of rows, so that all ranks can gather them.

    Attributes:
        probability: (n,) probabilities of the predicted classes; -1 for a row without a mistake.
        ids: (n, 3) int64: sample index, label and predicted class.
    """

    probability: Tensor
    ids: Tensor


class EvaluationSums:
    """Sums over the samples that this rank evaluates, on its device. No update waits for the device.

    torchmetrics' ConfusionMatrix and CalibrationError exclude padding by a boolean mask, which does wait.

    Attributes:
        confusion: (classes, classes) int64 numbers of samples; row: label, column: predicted class.
        bins: (15, 3): number of samples, sum of their probabilities, and number of correct predictions. A sample
            belongs to a bin by the probability of its predicted class; the bins have equal widths.
        mistakes: the most confident mistakes, in descending order.
    """

    def __init__(self, num_classes: int, device: torch.device) -> None:
        self.confusion = torch.zeros(num_classes, num_classes, dtype=torch.long, device=device)
        self.bins = torch.zeros(NUM_BINS, 3, device=device)
        no_ids = torch.full((MAX_MISTAKES, 3), -1, device=device)
        self.mistakes = Mistakes(torch.full((MAX_MISTAKES,), -1.0, device=device), no_ids)
        self._bin_edges = torch.linspace(0, 1, NUM_BINS + 1, device=device)[1:-1]

    def update(self, logits: Tensor, label: Tensor, weight: Tensor, sample_index: Tensor) -> None:
        """Add a batch.

        Args:
            logits: (n, classes).
            label: (n,) int64.
            weight: (n,), 1 for a sample and 0 for padding.
            sample_index: (n,) int64, which decides between mistakes of equal probability.
        """
        confidence, predicted = upcast_half(logits).softmax(1).max(1)
        self.confusion.view(-1).index_add_(0, label * len(self.confusion) + predicted, weight.long())
        weight = weight.to(confidence.dtype)
        is_correct = (predicted == label).to(confidence.dtype)
        rows = torch.stack([weight, weight * confidence, weight * is_correct], dim=1)
        number = torch.bucketize(confidence, self._bin_edges.to(confidence.dtype))
        self.bins = self.bins.to(confidence.dtype).index_add_(0, number, rows)
        probability = torch.where((weight > 0) & (predicted != label), confidence, -1)
        in_batch = _most_confident(Mistakes(probability, torch.stack([sample_index, label, predicted], dim=1)))
        both = zip(self.mistakes, in_batch, strict=True)
        self.mistakes = _most_confident(Mistakes(*(torch.cat(fields) for fields in both)))


def _most_confident(mistakes: Mistakes) -> Mistakes:
    """Return the first rows by descending probability and, where that is equal, ascending sample index."""
    order = mistakes.ids[:, 0].argsort(stable=True)
    order = order[mistakes.probability[order].argsort(descending=True, stable=True)][:MAX_MISTAKES]
    return Mistakes(*(field[order] for field in mistakes))


class Evaluation(L.Callback):
    """Writes `evaluation/val.json` and `evaluation/test.json` into the run folder after each validation and test.

    They contain the confusion matrix, the calibration by 15 bins, and the 64 most confident mistakes with their images.
    Loggers with a method `log_evaluation` get the same. Each sample counts once for any number of processes.
    Metrics: `val/calibration_error` is the expected calibration error (Guo et al., "On calibration of modern neural
    networks", 2017), and `val_class/NAME` the accuracy of a class; those of the test begin with `test`.

    The module's `validation_step` and `test_step` return the (n, classes) logits of their batch.

    Raises:
        UserError: if `validation_step` does not return them, before training; for `test_step` it is a warning.
    """

    def __init__(self) -> None:
        self._sums: EvaluationSums | None = None  # of the current evaluation
        self._loaded_step: int | None = None  # the step of the checkpoint that is tested, if one is loaded

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not hasattr(trainer.datamodule, "classes"):
            raise UserError(
                f"callbacks.evaluation is for classification, but {type(_data(trainer).plain).__name__} has no "
                "`classes`, the names in the order of the labels: add them, or set callbacks.evaluation=null"
            )
        # A batch before training shows whether the module returns its logits.
        trainer.num_sanity_val_steps = trainer.num_sanity_val_steps or 1

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if not trainer.training:
            self._loaded_step = checkpoint["global_step"]

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._sums = EvaluationSums(len(_data(trainer).classes), pl_module.device)

    def on_test_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.on_validation_epoch_start(trainer, pl_module)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._update(trainer, f"{type(pl_module).__name__}.validation_step", outputs, batch)

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._update(trainer, f"{type(pl_module).__name__}.test_step", outputs, batch)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._report(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._report(trainer, pl_module, "test")

    def _update(self, trainer: L.Trainer, step_name: str, logits: Any, batch: Batch | tuple[Tensor, Tensor]) -> None:
        """Add a batch: a Batch, or a pair of images and targets without the padding, which is at the end."""
        if self._sums is None:  # an earlier batch of the test had no logits
            return
        data = _data(trainer)
        expected = (len(batch[0]), len(data.classes))
        if not isinstance(logits, Tensor) or logits.shape != expected:
            message = (
                f"callbacks.evaluation is for classification and needs logits: let {step_name} return them, an "
                f"(images, classes) tensor, here {expected}; or set callbacks.evaluation=null"
            )
            if not trainer.testing:
                raise UserError(message)
            _log.warning("no evaluation/test.json: %s", message)  # the run has been trained, so it goes on
            self._sums = None
            return
        weight = batch.weight if isinstance(batch, Batch) else torch.ones_like(batch[1])
        self._sums.update(logits.detach(), batch[1], weight, data.sample_index[: len(batch[0])])

    def _report(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Sum over the ranks, log the metrics, and write the file on rank zero. Every rank must call it."""
        if self._sums is None:
            return
        data, sums, self._sums = _data(trainer), self._sums, None
        copies = trainer.world_size // data.parallel.dp_size  # ranks of one pipeline evaluate the same samples
        confusion = trainer.strategy.reduce(sums.confusion, reduce_op="sum").cpu() // copies
        bins = trainer.strategy.reduce(sums.bins, reduce_op="sum").cpu().double() / copies
        probability = module.all_gather(sums.mistakes.probability).flatten().cpu()
        ids = module.all_gather(sums.mistakes.ids).reshape(-1, 3).cpu()
        calibration = _calibration(bins)
        per_class = zip(data.classes, confusion.diag().tolist(), confusion.sum(1).tolist(), strict=True)
        accuracies = {f"{stage}_class/{name}": correct / count for name, correct, count in per_class if count}
        metrics = {f"{stage}/calibration_error": calibration["error"]} | accuracies
        # Equal on all ranks; without the option Lightning warns of each.
        module.log_dict({name: torch.tensor(value) for name, value in metrics.items()}, sync_dist=True)
        if trainer.sanity_checking or trainer.fast_dev_run or not trainer.is_global_zero:
            return
        evaluation = {
            "step": self._step(trainer),
            "classes": data.classes,
            "confusion": confusion.tolist(),
            "calibration": calibration,
            "mistakes": _describe(Mistakes(probability, ids), data, stage),
        }
        _write(evaluation, Path(trainer.default_root_dir) / "evaluation" / f"{stage}.json")
        for logger in trainer.loggers:
            if hasattr(logger, "log_evaluation"):
                logger.log_evaluation(stage, evaluation)

    def _step(self, trainer: L.Trainer) -> int:
        """Return the optimizer step of the weights that are evaluated."""
        if not trainer.testing:
            return trainer.global_step
        # `trainer.global_step` is zero in a process that is spawned for the test.
        steps = trainer.fit_loop.epoch_loop._batches_that_stepped
        return steps if self._loaded_step is None else self._loaded_step


def _data(trainer: L.Trainer) -> Any:
    return trainer.datamodule


def _write(evaluation: dict[str, Any], file: Path) -> None:
    """Write the file; if that fails, such as on a full disk, the run continues."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(evaluation))
    except OSError as error:
        _log.warning("callbacks.evaluation has not written %s, and the run continues: %s", file, error)


def _calibration(bins: Tensor) -> dict[str, Any]:
    """Return the expected calibration error and the bins, from their (15, 3) sums."""
    counts, confidences, correct = bins.unbind(1)
    rows = [
        {
            "count": round(count),
            "confidence": confidence / count if count else None,
            "accuracy": hits / count if count else None,
        }
        for count, confidence, hits in bins.tolist()
    ]
    return {"error": float((correct - confidences).abs().sum() / counts.sum()), "bins": rows}


def _describe(mistakes: Mistakes, data: Any, stage: str) -> list[dict[str, Any]]:
    """Return the most confident of all ranks' mistakes with their images, each sample once."""
    rows = {}
    for probability, (sample_index, label, predicted) in zip(*(field.tolist() for field in mistakes), strict=True):
        if probability >= 0:
            rows[sample_index] = {"label": label, "predicted": predicted, "probability": probability}
    first = sorted(rows, key=lambda sample_index: (-rows[sample_index]["probability"], sample_index))[:MAX_MISTAKES]
    if not hasattr(data, "splits"):  # no images
        return []
    dataset = data.splits[stage].dataset
    images = dataset.gather(torch.tensor(first, dtype=torch.long, device=dataset.labels.device)).cpu()
    return [
        {"sample_index": sample_index, **rows[sample_index], "image": _to_png(image)}
        for sample_index, image in zip(first, images, strict=True)
    ]


def _to_png(image: Tensor) -> str:
    """Return a (channels, height, width) uint8 image as PNG in base64."""
    pixels = image.permute(1, 2, 0).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()
