"""The user's own transforms of single images, on the host, with random numbers that depend only on the sample."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import Dataset

from src.data.augment.pixels import sample_keys
from src.data.batch import Batch
from src.data.sampler import TrainingBatches
from src.data.splits import ImageSplit
from src.utils.errors import UserError

Transform = Callable[[Tensor], Tensor]


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
        keys = sample_keys(self.seed, self.batches.epoch, batch.sample_index).tolist()
        with isolate_rng(include_cuda=False):
            images = [self._apply(image, key) for image, key in zip(batch.image, keys, strict=True)]
        return batch._replace(image=torch.stack(images))

    def _apply(self, image: Tensor, key: int) -> Tensor:
        """Apply the transforms to an image.

        Raises:
            UserError: if the result is no uint8 image of the same shape.
        """
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
