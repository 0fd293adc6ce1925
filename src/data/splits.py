"""A data set in memory, and how its training set is divided."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from src.data.batch import Batch
from src.data.hashing import permutation


class ImageSet:
    """All (n, channels, height, width) uint8 pictures of a data set and their (n,) labels, which its splits share."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def move(self, device: torch.device) -> None:
        """Keep them there from now on."""
        self.images, self.labels = self.images.to(device), self.labels.to(device)


class ImageSplit(Dataset[Batch]):
    """A split in memory; an item is a whole batch, fetched by its samples' places in the split (-1: padding)."""

    def __init__(self, held: ImageSet, members: Tensor) -> None:
        self.held, self.members = held, members

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, positions: Tensor) -> Batch:
        index = self.samples(positions)
        return self.batch(index, index >= 0)

    def samples(self, positions: Tensor) -> Tensor:
        """The indices of the samples at these places of the split; -1 stays what it is."""
        return torch.where(positions >= 0, self.members[positions], -1)

    def batch(self, index: Tensor, weight: Tensor) -> Batch:
        """The samples of (n,) indices, which lie where the pictures do. (Slower by far: `images[index]`.)"""
        rows = index.clamp_min(0)
        images, labels = (tensor.index_select(0, rows) for tensor in (self.held.images, self.held.labels))
        return Batch(images, labels, index, weight)


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
