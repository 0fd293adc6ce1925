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
    """All (n, channels, height, width) uint8 pictures of a data set and their (n,) labels, which its splits share."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self._bordered: Bordered | None = None

    def move(self, device: torch.device) -> None:
        """Keep them there from now on."""
        if device != self.images.device:
            self._bordered = None
        self.images, self.labels = self.images.to(device), self.labels.to(device)

    def pictures(self, index: Tensor) -> Tensor:
        """Those of (n,) indices, which lie where the pictures do. (Slower by far: `images[index]`.)"""
        return self._bordered.pictures(index) if self._bordered else self.images.index_select(0, index)

    def bordered(self, padding: int) -> Bordered:
        """Keep the pictures with borders from now on, where they are."""
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

    def __init__(self, held: ImageSet, members: Tensor) -> None:
        self.held, self.members = held, members

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, positions: Tensor) -> Batch:
        index = self.samples(positions)
        rows = index.clamp_min(0)
        return Batch(self.held.pictures(rows), self.held.labels[rows], index, index >= 0)

    def samples(self, positions: Tensor) -> Tensor:
        """The indices of the samples at these places of the split; -1 stays what it is."""
        return torch.where(positions >= 0, self.members[positions], -1)


def divide(labels: Tensor, share: float, limit: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """Divide the training set, class by class, into samples to train on and a `share` held out for validation.

    Of the former only the first `limit` are taken, which holds the classes in equal shares whatever the limit.
    """
    kept, held_out = [], []
    for label in range(int(labels.max()) + 1):
        members = torch.nonzero(labels == label).flatten()
        members = members[permutation(len(members), seed, label)]
        cut = round(len(members) * share)
        held_out.append(members[:cut])
        kept.append(members[cut:])
    in_turn = torch.cat([torch.arange(len(members)) / max(1, len(members)) for members in kept]).argsort(stable=True)
    chosen = torch.cat(kept)[in_turn[:limit]]
    return chosen.sort().values, torch.cat(held_out).sort().values
