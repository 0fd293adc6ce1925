"""A dataset in memory, and the division of its training set into training and validation samples."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from src.data.batch import Batch
from src.data.hashing import permutation
from src.data.sources.source import ImageSource
from src.utils.errors import UserError


class ImageSet:
    """All (n, channels, height, width) uint8 images of a dataset and their (n,) labels, which its splits share."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def move(self, device: torch.device) -> None:
        """Move the images and labels to the device, where they stay."""
        self.images, self.labels = self.images.to(device), self.labels.to(device)

    def gather(self, index: Tensor) -> Tensor:
        """Return the images of (n,) indices, which are on the same device. `images[index]` would be much slower."""
        return self.images.index_select(0, index)


def load(source: ImageSource, root: Path, name: str, num_classes: int) -> ImageSet:
    """Load the `train` or `test` part of a dataset.

    Raises:
        UserError: if a label is not below `num_classes`.
    """
    images, labels = source.load(root, name)
    if (highest := int(labels.max())) >= num_classes:
        raise UserError(f"data.root={root}: label {highest} in `{name}`, but data.num_classes={num_classes}")
    return ImageSet(images, labels.long())


class ImageSplit(Dataset[Batch]):
    """A split in memory; an item is a whole batch, fetched by (n,) positions in the split (-1: padding)."""

    def __init__(self, dataset: ImageSet, indices: Tensor) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, positions: Tensor) -> Batch:
        index = self.samples(positions)
        rows = index.clamp_min(0)
        return Batch(self.dataset.gather(rows), self.dataset.labels[rows], index, index >= 0)

    def samples(self, positions: Tensor) -> Tensor:
        """Return the dataset indices of positions in the split, in the same shape; -1 stays -1."""
        return torch.where(positions >= 0, self.indices[positions], -1)


def stratified_split(labels: Tensor, fraction: float, limit: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Divide a training set, class by class, into samples to train on and samples to validate on.

    Args:
        labels: (n,) int64.
        fraction: fraction of each class for validation.
        limit: number of samples to train on, the same fraction of each class; None for all.
        seed: determines which samples are for validation.

    Returns:
        The indices to train on, and those to validate on, each in ascending order.
    """
    train_index, val_index = [], []
    for label in range(int(labels.max()) + 1):
        of_class = torch.nonzero(labels == label).flatten()
        of_class = of_class[permutation(len(of_class), seed, label)]
        cut = round(len(of_class) * fraction)
        val_index.append(of_class[:cut])
        train_index.append(of_class[cut:])
    # Each sample's place within its class, from 0 to 1. In this order, every prefix has equal fractions of all classes.
    place = torch.cat([torch.arange(len(of_class)) / max(1, len(of_class)) for of_class in train_index])
    chosen = torch.cat(train_index)[place.argsort(stable=True)[:limit]]
    return chosen.sort().values, torch.cat(val_index).sort().values
