"""Write the predicted classes of a folder's images as a table."""

import csv
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from src.engine.utils.files import atomic_write

_log = logging.getLogger(__name__)


class PredictionWriter(BasePredictionWriter):
    """Writes `predictions.csv` into the run folder: each image's file, most probable class, and its probability.

    The module's `predict_step` returns the (n, classes) class probabilities of its batch.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__("epoch")
        self.file = folder / "predictions.csv"
        self._sample_index: list[Tensor] = []

    def on_predict_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._sample_index.append(trainer.datamodule.sample_index)

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Gather the predictions of all ranks, drop the padding, and write the table on rank zero."""
        index, probabilities = torch.cat(self._sample_index), torch.cat(list(predictions))
        index, probabilities = pl_module.all_gather(index).flatten(), pl_module.all_gather(probabilities).flatten(0, -2)
        if not trainer.is_global_zero:
            return
        data: Any = trainer.datamodule
        loaders: Any = trainer.predict_dataloaders
        highest, classes = (values.tolist() for values in probabilities.max(1))
        rows = zip(index.tolist(), classes, highest, strict=True)
        predicted = {number: (label, probability) for number, label, probability in rows if number >= 0}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.file) as temporary, temporary.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(["file", "class", "probability"])
            for number, (label, probability) in sorted(predicted.items()):
                file = loaders.dataset.files[number].relative_to(data.predict_dir)
                writer.writerow([file, data.classes[label], f"{probability:.4f}"])
        _log.info("the classes of %d images are in %s", len(predicted), self.file)
