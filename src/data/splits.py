"""A dataset in memory, and the split of its training set into training and validation samples."""

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


def load_images(source: ImageSource, root: Path, split: str, num_classes: int) -> ImageSet:
    """Load the `train` or `test` part of a dataset.

    Raises:
        UserError: if a label is not below `num_classes`.
    """
    images, labels = source.load(root, split)
    if (highest := int(labels.max())) >= num_classes:
        raise UserError(f"data.root={root}: label {highest} in `{split}`, but data.num_classes={num_classes}")
    return ImageSet(images, labels.long())


class ImageSplit(Dataset[Batch]):
    """A split in memory; an item is a batch, fetched by (n,) positions in the split (-1: padding)."""

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
