"""Datasets of images whose items are batches, and the user's transforms of single images, on the host."""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset

from src.engine.determinism.batch import Batch
from src.engine.determinism.hashing import hash_ints
from src.engine.determinism.sampler import TrainingBatches
from src.engine.utils.errors import UserError

Transform = Callable[[Tensor], Tensor]


class Images(Protocol):
    """The images of a split: a tensor, or an object that reads the images of a batch when they are fetched."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Tensor, /) -> Tensor:
        """Return the images of (n,) indices, (n, channels, height, width) uint8."""


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


class TransformedSplit(Dataset[Batch]):
    """A split for training whose images go through transforms when they are fetched, by workers if there are any.

    The global generators of torch, NumPy and Python are seeded with a hash of (seed, epoch, sample) for each image. So
    neither the number of processes nor a restart changes the images.

    Args:
        split: the training samples.
        transforms: map a (channels, height, width) uint8 image to another of the same shape, in this order.
        seed: the seed of the run.
        batches: the sampler, whose epoch counts. Workers have a copy from the start of the epoch.
    """

    def __init__(self, split: ImageSplit, transforms: Sequence[Transform], seed: int, batches: TrainingBatches) -> None:
        self.split, self.transforms, self.seed, self.batches = split, transforms, seed, batches

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, positions: Tensor) -> Batch:
        batch = self.split[positions]
        keys = hash_ints(self.seed, self.batches.epoch, batch.sample_index).tolist()
        with isolate_rng(include_cuda=False):
            images = [self._apply(image, key) for image, key in zip(batch.image, keys, strict=True)]
        return batch._replace(image=torch.stack(images))

    def _apply(self, image: Tensor, key: int) -> Tensor:
        """Apply the transforms to an image."""
        torch.default_generator.manual_seed(key)  # torch.manual_seed would also seed, and so use, the GPUs
        random.seed(key)
        np.random.seed(key % 2**32)
        shape = image.shape
        for transform in self.transforms:
            image = transform(image)
            if image.dtype != torch.uint8 or image.shape != shape:
                raise UserError(
                    f"data.augment.transforms: {_name(transform)} returns {image.dtype} {tuple(image.shape)}, "
                    f"but must return torch.uint8 {tuple(shape)}"
                )
        return image


def _name(transform: Transform) -> str:
    function = getattr(transform, "func", transform)  # of a partial function
    return getattr(function, "__name__", type(function).__name__)
