"""Write predictions: the classes of a folder's images as a table, or what any module predicts for any loader."""

import csv
import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from onecurve.data.rank_loader import fetches_batches
from onecurve.errors import UserError
from onecurve.patches.torch import tree_leaves
from onecurve.records.files import atomic_write

_log = logging.getLogger(__name__)


class PredictionWriter(L.Callback):
    """Writes what `predict_step` returns for the samples of `predict_dataloader` into the run folder.

    `predictions.pt` is a list with a dictionary for each loader: `sample_index` has the (n,) indices in its dataset,
    in ascending order, and `predictions` the outputs of all batches in one: tensors with a row for each of these
    samples, or lists of such rows if their sizes differ. With `of_images`, a loader of image files whose outputs are
    the (n, classes) class probabilities, it is the table `predictions.csv`: each image's file, most probable class, and
    its probability.
    """

    def __init__(self, folder: Path, of_images: bool) -> None:
        self.file, self.of_images = folder / ("predictions.csv" if of_images else "predictions.pt"), of_images

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._batches: dict[int, list[tuple[Tensor, Any]]] = {}  # of each loader
        self._datasets = [loader.dataset for loader in tree_leaves(trainer.predict_dataloaders)]
        if self.of_images and not (len(self._datasets) == 1 and fetches_batches(self._datasets[0])):
            raise UserError(
                "predict=FOLDER takes a loader of image files: set predict=true to predict those of your own"
            )

    def on_predict_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        predicted = move_data_to_device((trainer.datamodule.sample_index, outputs), torch.device("cpu"))
        self._batches.setdefault(dataloader_idx, []).append(predicted)

    def on_predict_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather the predictions of all ranks, and write them on rank zero."""
        ranks: list[Any] = [self._batches]
        if dist.is_initialized():
            ranks = [None] * dist.get_world_size()
            dist.gather_object(self._batches, ranks if trainer.is_global_zero else None)
        if not trainer.is_global_zero:
            return
        batches = [[batch for rank in ranks for batch in rank[number]] for number in sorted(self._batches)]
        loaders = [_in_order(each) for each in batches]
        with atomic_write(self.file) as temporary:
            if self.of_images:
                _write_table(temporary, trainer.datamodule, self._datasets[0].files, **loaders[0])
            else:
                torch.save(loaders, temporary)
        count = sum(len(each["sample_index"]) for each in loaders)
        _log.info("the predictions of %d samples are in %s", count, self.file)


def _write_table(file: Path, data: Any, images: list[Path], sample_index: Tensor, predictions: Tensor) -> None:
    highest, classes = predictions.max(1)
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["file", "class", "probability"])
        for number, label, probability in zip(*map(Tensor.tolist, (sample_index, classes, highest)), strict=True):
            image = images[number].relative_to(data.predict_dir)
            writer.writerow([image, data.classes[label], f"{probability:.4f}"])


def _in_order(batches: list[tuple[Tensor, Any]]) -> dict[str, Any]:
    samples: dict[int, Any] = {}  # by index; the ranks of a pipeline have predicted the same samples
    for indices, outputs in batches:
        for number, index in enumerate(indices.tolist()):
            samples.setdefault(index, _sample(outputs, number, len(indices)))
    samples.pop(-1, None)  # padding
    in_order = sorted(samples)
    predictions = _stack([samples[index] for index in in_order])
    return {"sample_index": torch.tensor(in_order, dtype=torch.int64), "predictions": predictions}


def _sample(outputs: Any, number: int, count: int) -> Any:
    """Return what the outputs of a batch of `count` samples say of one: its row, or what all have in common."""
    if isinstance(outputs, dict):
        return {name: _sample(value, number, count) for name, value in outputs.items()}
    if _has_rows(outputs, count):
        return outputs[number]
    if not isinstance(outputs, list | tuple):
        return outputs
    is_of_samples = isinstance(outputs, list) and len(outputs) == count
    if is_of_samples and not all(_has_rows(value, count) for value in outputs):  # else they are of several heads
        return outputs[number]
    return tuple(_sample(value, number, count) for value in outputs)


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == count


def _stack(samples: list[Any]) -> Any:
    """Return the outputs of samples as one: tensors with a row for each, or lists if their sizes differ."""
    first = samples[0]
    if isinstance(first, dict):
        return {name: _stack([sample[name] for sample in samples]) for name in first}
    if isinstance(first, tuple):
        return tuple(_stack(list(values)) for values in zip(*samples, strict=True))
    has_one_shape = len({getattr(one, "shape", None) for one in samples}) == 1
    return torch.stack(samples) if isinstance(first, Tensor) and has_one_shape else samples
