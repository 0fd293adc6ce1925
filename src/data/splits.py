"""A data set in memory, and how its training set is divided."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from src.data.batch import Batch
from src.data.hashing import permutation


class ImageSplit(Dataset[Batch]):
    """A split in memory; an item is a whole batch, fetched by its samples' indices (-1: padding)."""

    def __init__(self, images: Tensor, labels: Tensor, members: Tensor) -> None:
        self.images, self.labels, self.members = images, labels, members

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, positions: Tensor) -> Batch:
        index = torch.where(positions >= 0, self.members[positions], -1)
        return Batch(self.images[index], self.labels[index], index, weight=index >= 0)


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
