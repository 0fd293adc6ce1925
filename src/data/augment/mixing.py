"""Mixup and CutMix: blend images, or paste a box of one into another, and mix their targets accordingly.

A sample's partner is half a global batch further on. The sampler assigns both to the same process and the same
micro-batch, for any number of processes. The mixing fraction is drawn once per optimizer step. So neither the number
of processes nor gradient accumulation changes what the network learns.
"""

import math

import numpy as np
from torch import Tensor


def partners(values: Tensor) -> Tensor:
    """Return the values of each sample's partner, for (n, ...) values of an even number n of samples."""
    return values.roll(len(values) // 2, 0)


def mixup(image: Tensor, target: Tensor, alpha: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Blend each image and target with its partner's, by a fraction drawn from Beta(alpha, alpha).

    Images are (n, channels, height, width), targets (n, classes). Zhang et al., "mixup: beyond empirical risk
    minimization" (2017).
    """
    share = float(rng.beta(alpha, alpha))
    return image.lerp(partners(image), share), target.lerp(partners(target), share)


def cutmix(image: Tensor, target: Tensor, alpha: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Paste a box of its partner into each image; Beta(alpha, alpha) gives the box's fraction of the image area.

    Images are (n, channels, height, width), targets (n, classes). The targets are mixed by the fraction of the image
    that the part of the box inside it covers. Yun et al., "CutMix: regularization strategy to train strong
    classifiers" (2019).
    """
    side = math.sqrt(float(rng.beta(alpha, alpha)))
    spans = []
    for size in image.shape[-2:]:
        first = int(rng.integers(size)) - int(size * side) // 2
        spans.append(slice(max(0, first), min(size, first + int(size * side))))
    mixed = image.clone()
    mixed[..., spans[0], spans[1]] = partners(image)[..., spans[0], spans[1]]
    share = math.prod(span.stop - span.start for span in spans) / math.prod(image.shape[-2:])
    return mixed, target.lerp(partners(target), share)
