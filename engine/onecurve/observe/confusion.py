"""Record what a classifier confuses, and how reliable its probabilities are."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics.classification import MulticlassCalibrationError, MulticlassConfusionMatrix

from onecurve.data.batch import Batch
from onecurve.errors import UserError
from onecurve.network.tensors import upcast_half
from onecurve.observe.steps import trained_steps
from onecurve.patches.lightning_loops import steps_of_loggers
from onecurve.records.files import atomic_write


class Evaluation(L.Callback):
    """Writes `evaluation/val.json` and `evaluation/test.json` into the run folder after each validation and test.

    They contain the confusion matrix. Loggers with a method `log_evaluation` get the same. Each sample counts once for
    any number of processes.
    Metrics: `val/calibration_error` is the expected calibration error in 15 bins (Guo et al., "On calibration of modern
    neural networks", 2017), and `val_class/NAME` the accuracy of a class; those of the test begin with `test`.

    The module's `validation_step` and `test_step` return the (n, classes) logits of their batch.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if not hasattr(data, "classes"):
            raise UserError(
                f"callbacks.evaluation is for classification, but {type(data.plain).__name__} has no `classes`, the "
                "names in the order of the labels: add them, or set callbacks.evaluation=null"
            )
        self._confusion = MulticlassConfusionMatrix(len(data.classes), validate_args=False)
        self._calibration = MulticlassCalibrationError(len(data.classes), n_bins=15, validate_args=False)
        self._loaded_step: int | None = None  # the step of the checkpoint that is tested, if one is loaded
        # A batch before training shows whether the module returns its logits.
        trainer.num_sanity_val_steps = trainer.num_sanity_val_steps or 1

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if not trainer.training:
            self._loaded_step = checkpoint.get("position", {"steps": checkpoint["global_step"]})["steps"]

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Add a batch: a Batch, or a pair of images and targets without the padding."""
        expected = (len(batch[0]), self._confusion.num_classes)
        if not isinstance(outputs, Tensor) or outputs.shape != expected:
            step = "test_step" if trainer.testing else "validation_step"
            raise UserError(
                f"callbacks.evaluation is for classification and needs logits: let {type(pl_module).__name__}.{step} "
                f"return them, an (images, classes) tensor, here {expected}; or set callbacks.evaluation=null"
            )
        probabilities, target = upcast_half(outputs.detach()).softmax(1), batch[1]
        if isinstance(batch, Batch):
            is_sample = batch.weight > 0  # not padding
            probabilities, target = probabilities[is_sample], target[is_sample]
        for metric in (self._confusion, self._calibration):
            metric.to(target.device).update(probabilities, target)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Combine the ranks, log the metrics, and write the file on rank zero. Every rank must call it."""
        data: Any = trainer.datamodule
        stage = "test" if trainer.testing else "val"
        confusion = self._confusion.compute().cpu()
        error = self._calibration.compute().cpu()
        self._confusion.reset()
        self._calibration.reset()
        per_class = zip(data.classes, confusion.diag().tolist(), confusion.sum(1).tolist(), strict=True)
        accuracies = {f"{stage}_class/{name}": torch.tensor(hits / count) for name, hits, count in per_class if count}
        # Equal on all ranks; without the option Lightning warns of each.
        pl_module.log_dict({f"{stage}/calibration_error": error} | accuracies, sync_dist=True)
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        # The first is zero in a process that is spawned for the test.
        trained = trained_steps(trainer) or steps_of_loggers(trainer)
        step = trained if self._loaded_step is None else self._loaded_step
        evaluation = {"step": step, "classes": [*map(str, data.classes)], "confusion": confusion.tolist()}
        file = Path(trainer.default_root_dir) / "evaluation" / f"{stage}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(file) as temporary:
            temporary.write_text(json.dumps(evaluation))
        for logger in trainer.loggers:
            if hasattr(logger, "log_evaluation"):
                logger.log_evaluation(stage, evaluation)

    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end
