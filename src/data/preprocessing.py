"""Preprocessing of a batch on its device: normalization and, in training, augmentation."""

from typing import Any

import torch
from torch import Tensor

from src.data.augment.augmentation import Augmentation
from src.data.augment.pixels import normalize
from src.data.batch import Batch
from src.data.layout import BatchLayout
from src.utils.compilation import compiled, should_compile


class Preprocessing:
    """Turns a batch of uint8 images into what the network gets.

    Args:
        augment: the augmentation of training images.
        mean, std: statistics of the dataset per channel, of pixels in [0, 1].
        num_classes: number of classes, for mixed targets.
        seed: the seed of the run.
    """

    def __init__(self, augment: Augmentation, mean: list[float], std: list[float], num_classes: int, seed: int) -> None:
        self.augmentation, self.mean, self.std = augment, mean, std
        self.num_classes, self.seed = num_classes, seed

    def augment(self, batch: Batch, layout: BatchLayout, epoch: int, step: int, dtype: torch.dtype) -> Batch:
        """Augment and normalize a training batch; the mean of its loss over ranks is the mean over the samples."""
        keys, mirrored = self.augmentation.keys(self.seed, epoch, batch.sample_index)
        transform: Any = Preprocessing._transform
        if should_compile(self.augmentation.compile, batch.image):
            transform = compiled(transform)
        image, weight = transform(self, batch.image, keys, mirrored, batch.weight, layout.mean_samples_per_batch, dtype)
        image, target = self.augmentation.mix(image, batch.target, layout, self.seed, step, self.num_classes)
        return Batch(image, target, batch.sample_index, weight)

    def _transform(
        self,
        image: Tensor,
        keys: Tensor,
        mirrored: Tensor | None,
        weight: Tensor,
        mean_samples: float,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """Return the images and the weights; no number in here changes with the step, which would compile it again."""
        image = self.augmentation.augment_pixels(image, keys, mirrored)
        image = self.augmentation.apply_cutout(normalize(image, self.mean, self.std, dtype), keys)
        return image, weight.to(dtype) / mean_samples

    def normalize(self, batch: Batch, dtype: torch.dtype) -> Batch:
        """Normalize an evaluation batch; its weights become floats."""
        image = normalize(batch.image, self.mean, self.std, dtype)
        return batch._replace(image=image, weight=batch.weight.to(dtype))

    def to_pixels(self, image: Tensor) -> Tensor:
        """Undo the normalization, and return (n, channels, height, width) images in [0, 1]."""
        mean, std = (torch.tensor(values, device=image.device)[:, None, None] for values in (self.mean, self.std))
        return (image * std + mean).clamp(0, 1)
