"""The configured augmentation of training batches: a pure function of seed, epoch, step and sample."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from onecurve import BatchLayout, UserError, partners
from src.data.augment import mixing
from src.data.augment.pixels import all_alternating_flips, all_sample_keys, crop_and_flip, cutout, normalize


class Augmentation:
    """The augmentation of training batches, in the order of the arguments up to `mix_probability`.

    Args:
        crop_padding: pixels of reflected border around an image before its random crop; 0 for no crop.
        flip: mirror a random half of the images; `alternating` mirrors the other half in every other epoch.
        cutout: side of a square set to the mean color, in pixels; 0 for none.
        mixup, cutmix: alpha of the Beta distribution; 0 for none. If both are set, each step uses one of them.
        mix_probability: probability that a step mixes its images.
        transforms: functions of single images, (channels, height, width) uint8, which return the same shape and type;
            they run first, on the host (src/data/images.py).
        compile: whether a GPU runs augmentation and normalization compiled; a mode of torch.compile counts as true.

    Attributes:
        samples: number of samples of the dataset, whose keys are computed once per epoch.
    """

    hardware_options = ("compile",)  # they change no curve
    samples: int

    def __init__(
        self,
        crop_padding: int = 4,
        flip: bool | str = True,
        cutout: int = 0,
        mixup: float = 0.0,
        cutmix: float = 0.0,
        mix_probability: float = 1.0,
        transforms: Sequence[Callable[[Tensor], Tensor]] = (),
        compile: bool | str = False,
    ) -> None:
        for name, value in {"crop_padding": crop_padding, "cutout": cutout, "mixup": mixup, "cutmix": cutmix}.items():
            if value < 0:
                raise UserError(f"data.augment.{name}={value}: give a number of at least zero, which means none")
        if not 0 <= mix_probability <= 1:
            raise UserError(f"data.augment.mix_probability={mix_probability}: give a fraction between 0 and 1")
        if flip not in (True, False, "alternating"):
            raise UserError(f"data.augment.flip={flip}: give true, false or alternating")
        self.crop_padding, self.flip, self.cutout = crop_padding, flip, cutout
        self.mixers = [(mix, alpha) for mix, alpha in ((mixing.mixup, mixup), (mixing.cutmix, cutmix)) if alpha > 0]
        self.mix_probability, self.transforms, self.compile = mix_probability, transforms, compile

    def keys(self, seed: int, epoch: int, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the keys of the random numbers of (n,) samples in an epoch, (n,).

        The second tensor tells which images to mirror, (n,) bool, if the flips alternate.
        """
        keys = all_sample_keys(seed, epoch, self.samples, index.device).index_select(0, index)
        if self.flip != "alternating":
            return keys, None
        return keys, all_alternating_flips(seed, epoch, self.samples, index.device).index_select(0, index)

    def augment_pixels(self, image: Tensor, keys: Tensor, mirrored: Tensor | None) -> Tensor:
        """Crop and mirror (n, channels, height, width) uint8 images; `keys` and `mirrored` are those of `keys()`."""
        if self.crop_padding or self.flip:
            image = crop_and_flip(image, keys, self.crop_padding, bool(self.flip) if mirrored is None else mirrored)
        return image

    def transform(
        self,
        image: Tensor,
        keys: Tensor,
        mirrored: Tensor | None,
        mean: list[float],
        std: list[float],
        dtype: torch.dtype,
    ) -> Tensor:
        """Return augmented and normalized images; no number in here changes with the step, which would recompile it."""
        image = normalize(self.augment_pixels(image, keys, mirrored), mean, std, dtype)
        return cutout(image, keys, self.cutout) if self.cutout else image

    def mix(
        self, image: Tensor, target: Tensor, layout: BatchLayout, seed: int, step: int, num_classes: int
    ) -> tuple[Tensor, Tensor]:
        """Mix the normalized images of a step, if a mixer is set, and their (n,) class indices with them.

        The targets become (n, classes) class probabilities. All images of a step share the random numbers.
        """
        if not self.mixers:
            return image, target
        target = (target[:, None] == torch.arange(num_classes, device=target.device)).to(image.dtype)
        rng = np.random.default_rng((seed, step))
        if rng.random() < self.mix_probability:
            mix, alpha = self.mixers[rng.integers(len(self.mixers))]
            image, target = mix(image, target, partners(layout, image.device), alpha, rng)
        return image, target
