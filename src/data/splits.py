"""A data set in memory, and how its training set is divided."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from src.data.augment.crops import Bordered
from src.data.batch import Batch
from src.data.hashing import permutation
from src.data.sources.source import ImageSource
from src.utils.errors import UserError


class ImageSet:
    """All (n, channels, height, width) uint8 images of a data set and their (n,) labels, which its splits share."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self._bordered: Bordered | None = None

    def move(self, device: torch.device) -> None:
        """Keep them there from now on."""
        if device != self.images.device:
            self._bordered = None
        self.images, self.labels = self.images.to(device), self.labels.to(device)

    def gather(self, index: Tensor) -> Tensor:
        """Those of (n,) indices, which lie where the images do. (Slower by far: `images[index]`.)"""
        return self._bordered.gather(index) if self._bordered else self.images.index_select(0, index)

    def bordered(self, padding: int) -> Bordered:
        """Keep the images with borders from now on, where they are."""
        if self._bordered is None or self._bordered.padding != padding:
            self._bordered = Bordered(self.images, padding)
            self.images = self._bordered.images
        return self._bordered


def load(source: ImageSource, root: Path, name: str, num_classes: int) -> ImageSet:
    """The `train` or `test` part of a data set; its labels must be below `num_classes`."""
    images, labels = source.load(root, name)
    if (highest := int(labels.max())) >= num_classes:
        raise UserError(f"data.root={root}: label {highest} in `{name}`, but data.num_classes={num_classes}")
    return ImageSet(images, labels.long())


class ImageSplit(Dataset[Batch]):
    """A split in memory; an item is a whole batch, fetched by its samples' places in the split (-1: padding)."""

    def __init__(self, dataset: ImageSet, indices: Tensor) -> None:
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, positions: Tensor) -> Batch:
        index = self.samples(positions)
        rows = index.clamp_min(0)
        return Batch(self.dataset.gather(rows), self.dataset.labels[rows], index, index >= 0)

    def samples(self, positions: Tensor) -> Tensor:
        """The indices of the samples at these places of the split; -1 stays what it is."""
        return torch.where(positions >= 0, self.indices[positions], -1)


def stratified_split(labels: Tensor, fraction: float, limit: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Divide a training set, class by class, into samples to train on and samples to validate on.

    Args:
        labels: (n,) int64.
        fraction: of each class, held out for validation.
        limit: train on so many samples only, with the same fraction of each class; None for all.
        seed: fixes which samples are held out.

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
    # A sample's place within its class, from 0 to 1: taken in this order, every prefix has equal parts of all classes.
    place = torch.cat([torch.arange(len(of_class)) / max(1, len(of_class)) for of_class in train_index])
    chosen = torch.cat(train_index)[place.argsort(stable=True)[:limit]]
    return chosen.sort().values, torch.cat(val_index).sort().values
