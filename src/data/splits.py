"""Load the images of a dataset, check them, and divide them into training, validation and test samples."""

from pathlib import Path

import torch
from torch import Tensor

from onecurve import UserError, permutation
from src.data.images import ImageSet, ImageSplit
from src.data.sources.source import ImageSource

_VAL_FRACTION = 0.1
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def load_sets(
    source: ImageSource, root: Path, num_classes: int, image_shape: tuple[int, int, int]
) -> dict[str, ImageSet]:
    """Load `train`, `test` and, if the dataset has its own validation images, `val`."""
    has_val = getattr(source, "has_val", lambda root: False)
    names = ["train", "test", *(["val"] if has_val(root) else [])]
    sets = {name: _load_set(source, root, name, num_classes, image_shape) for name in names}
    if (count := len(source.classes)) not in (0, num_classes):
        raise UserError(
            f"data.num_classes={num_classes}, but the data has {count} classes ({source.description}): set it to that"
        )
    return sets


def _load_set(
    source: ImageSource, root: Path, split: str, num_classes: int, image_shape: tuple[int, int, int]
) -> ImageSet:
    images, labels = source.load(root, split)
    where = f"data.source ({source.description})"
    if not len(images) or len(images) != len(labels):
        raise UserError(f"{where}: `{split}` has {len(images)} images and {len(labels)} labels")
    first = images[torch.tensor([0])][0]
    if first.dtype != torch.uint8 or first.shape != image_shape:
        raise UserError(
            f"{where}: the images of `{split}` are {first.dtype} of shape {list(first.shape)}, not torch.uint8 (pixels "
            f"from 0 to 255) of data.image_shape={list(image_shape)} [channels, height, width]: change one of them"
        )
    if labels.ndim != 1 or labels.dtype not in _INTEGERS:
        raise UserError(
            f"{where}: the labels of `{split}` are {labels.dtype} of shape {list(labels.shape)}: "
            "this DataModule is for images of one class each, so give one integer per image"
        )
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= num_classes:
        raise UserError(
            f"data.num_classes={num_classes}, but `{split}` has labels from {lowest} to {highest}: "
            "labels count from 0 to data.num_classes - 1"
        )
    return ImageSet(images, labels.long())


def divide(
    sets: dict[str, ImageSet], val_fraction: float | None, train_samples: int | None, seed: int
) -> dict[str, ImageSplit]:
    """Return the splits `train`, `val` and `test`.

    Args:
        sets: the images of `train`, `test` and, if the dataset has its own validation images, `val`.
        val_fraction: fraction of each class of `train` that is held out, if `val` is missing; None for a tenth.
        train_samples: number of training samples, the same fraction of each class; None for all.
        seed: determines which samples are held out.
    """
    if "val" in sets and val_fraction:
        raise UserError(
            f"data.val_fraction={val_fraction}, but the dataset has its own validation images: set it to null"
        )
    fraction = 0.0 if "val" in sets else _VAL_FRACTION if val_fraction is None else val_fraction
    train_index, val_index = stratified_split(sets["train"].labels, fraction, train_samples, seed)
    if train_samples is not None and train_samples > len(train_index):
        raise UserError(
            f"data.train_samples={train_samples} exceeds the {len(train_index)} images to train on: "
            "give fewer, or null for all"
        )
    if not len(train_index):
        raise UserError(f"data.val_fraction={val_fraction} leaves no image to train on: give a smaller one")
    complete = {name: ImageSplit(dataset, torch.arange(len(dataset.labels))) for name, dataset in sets.items()}
    held_out = ImageSplit(sets["train"], val_index)
    return {
        "train": ImageSplit(sets["train"], train_index),
        "val": complete.get("val", held_out),
        "test": complete["test"],
    }


def stratified_split(labels: Tensor, fraction: float, limit: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Split a training set, class by class, into samples for training and samples for validation.

    Args:
        labels: (n,) int64.
        fraction: fraction of each class for validation.
        limit: number of training samples, the same fraction of each class; None for all.
        seed: determines which samples are for validation.

    Returns:
        The training indices and the validation indices, each in ascending order.
    """
    train_index, val_index, position_in_class = [], [], []
    for label in range(int(labels.max()) + 1):
        class_samples = torch.nonzero(labels == label).flatten()
        class_samples = class_samples[permutation(len(class_samples), seed, label)]
        num_val = round(len(class_samples) * fraction)
        num_train = len(class_samples) - num_val
        val_index.append(class_samples[:num_val])
        train_index.append(class_samples[num_val:])
        position_in_class.append(torch.arange(num_train) / max(1, num_train))  # from 0 to 1
    # In the order of the positions, every prefix has equal fractions of all classes.
    order = torch.cat(position_in_class).argsort(stable=True)
    limited = torch.cat(train_index)[order[:limit]]
    return limited.sort().values, torch.cat(val_index).sort().values
