"""The images of a dataset, and the split of its training set into training and validation samples."""

import logging
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from src.data.batch import Batch
from src.data.hashing import permutation
from src.data.sources.source import Images, ImageSource, has_val_split
from src.utils.errors import UserError

_log = logging.getLogger(__name__)
_VAL_FRACTION = 0.1


class ImageSet:
    """All (n, channels, height, width) uint8 images of a dataset and their (n,) labels, which its splits share."""

    def __init__(self, images: Images, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def move(self, device: torch.device) -> None:
        """Move the images, a tensor, and the labels to the device, where they stay."""
        assert isinstance(self.images, Tensor)
        self.images, self.labels = self.images.to(device), self.labels.to(device)

    def gather(self, index: Tensor) -> Tensor:
        """Return the images of (n,) indices, which are on the device of a tensor of images."""
        if isinstance(self.images, Tensor):
            return self.images.index_select(0, index)  # `images[index]` would be much slower
        return self.images[index]


def load_sets(
    source: ImageSource, root: Path, num_classes: int, image_shape: tuple[int, int, int]
) -> dict[str, ImageSet]:
    """Load `train`, `test` and, if the dataset has its own validation images, `val`.

    Raises:
        UserError: if the images or the number of classes are not as configured.
    """
    names = ["train", "test", *(["val"] if has_val_split(source, root) else [])]
    sets = {name: _load_set(source, root, name, num_classes, image_shape) for name in names}
    if (count := len(source.classes)) not in (0, num_classes):
        raise UserError(
            f"data.num_classes={num_classes}, but the data has {count} classes ({source.description}): set it to that"
        )
    if not count and (highest := int(sets["train"].labels.max())) < num_classes - 1:
        _log.warning(
            "data.num_classes=%d, but the highest label of `train` is %d: data.num_classes=%d is enough",
            *(num_classes, highest, highest + 1),
        )
    return sets


def _load_set(
    source: ImageSource, root: Path, split: str, num_classes: int, image_shape: tuple[int, int, int]
) -> ImageSet:
    images, labels = source.load(root, split)
    if not len(images) or len(images) != len(labels):
        raise UserError(f"data.root={root}: `{split}` has {len(images)} images and {len(labels)} labels")
    first = images[torch.tensor([0])][0]
    if first.dtype != torch.uint8:
        raise UserError(
            f"data.root={root}: the images of `{split}` are {first.dtype}: store pixels from 0 to 255 as uint8"
        )
    if first.shape != image_shape:
        raise UserError(
            f"data.image_shape={list(image_shape)}, but the images of `{split}` are {list(first.shape)} "
            "(channels, height, width): set it to that"
        )
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= num_classes:
        raise UserError(
            f"data.num_classes={num_classes}, but `{split}` has labels from {lowest} to {highest}: "
            "labels count from 0 to data.num_classes - 1"
        )
    return ImageSet(images, labels.long())


class ImageSplit(Dataset[Batch]):
    """A split of a dataset; an item is a batch, fetched by (n,) positions in the split (-1: padding)."""

    def __init__(self, dataset: ImageSet, indices: Tensor) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, positions: Tensor) -> Batch:
        index = self.sample_indices(positions)
        rows = index.clamp_min(0)  # padding fetches sample 0, with weight 0
        return Batch(self.dataset.gather(rows), self.dataset.labels[rows], index, index >= 0)

    def sample_indices(self, positions: Tensor) -> Tensor:
        """Return the dataset indices of positions in the split, in the same shape; -1 stays -1."""
        return torch.where(positions >= 0, self.indices[positions], -1)


def divide(
    sets: dict[str, ImageSet], val_fraction: float | None, train_samples: int | None, seed: int
) -> dict[str, ImageSplit]:
    """Return the splits `train`, `val` and `test`.

    Args:
        sets: the images of `train`, `test` and, if the dataset has its own validation images, `val`.
        val_fraction: fraction of each class of `train` that is held out, if `val` is missing; None for a tenth.
        train_samples: number of training samples, the same fraction of each class; None for all.
        seed: determines which samples are held out.

    Raises:
        UserError: if there are fewer training samples, or a fraction is given although there is `val`.
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
