"""Mixup and CutMix: blend images, or paste a box of one into another, and mix their targets accordingly.

A sample's partner is half a global batch further on. Both are on the same process and in the same micro-batch, for any
number of processes (`BatchLayout` of the engine). The mixing fraction is drawn once per optimizer step. Therefore
neither the number of processes nor gradient accumulation changes what the network learns.
"""

import math

import numpy as np
from torch import Tensor


def mixup(
    image: Tensor, target: Tensor, partners: Tensor, alpha: float, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Blend each image and target with its partner's, by a fraction drawn from Beta(alpha, alpha).

    Images are (n, channels, height, width), targets (n, classes), partners (n,) rows. Zhang et al., "mixup: beyond
    empirical risk minimization" (2017).
    """
    fraction = float(rng.beta(alpha, alpha))
    return image.lerp(image[partners], fraction), target.lerp(target[partners], fraction)


def cutmix(
    image: Tensor, target: Tensor, partners: Tensor, alpha: float, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Paste a box of its partner into each image; Beta(alpha, alpha) gives the box's fraction of the image area.

    Images are (n, channels, height, width), targets (n, classes), partners (n,) rows. The targets are mixed by the
    fraction of the image that the part of the box inside it covers. Yun et al., "CutMix: regularization strategy to
    train strong classifiers" (2019).
    """
    side = math.sqrt(float(rng.beta(alpha, alpha)))  # as a fraction of the image's side
    height, width = image.shape[-2:]
    rows, columns = _random_span(height, side, rng), _random_span(width, side, rng)
    mixed = image.clone()
    mixed[..., rows, columns] = image[partners][..., rows, columns]
    fraction = (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)
    return mixed, target.lerp(target[partners], fraction)


def _random_span(size: int, fraction: float, rng: np.random.Generator) -> slice:
    """Return a span around a random center, `fraction` of `size` long where the image's border does not cut it."""
    length = int(size * fraction)
    first = int(rng.integers(size)) - length // 2
    return slice(max(0, first), min(size, first + length))
