"""Mixup and CutMix: images blended, or pasted into each other, and their targets with them.

A sample's partner stands half a global batch further on. The sampler deals that one to the same process, whatever
their number, and to the same micro-batch; the share that it gets is drawn once per optimiser step. So neither the
number of processes nor accumulation changes what is learnt.
"""

import math

import numpy as np
from torch import Tensor


def partners(values: Tensor) -> Tensor:
    """Each sample's partner, for an even number of samples."""
    return values.roll(len(values) // 2, 0)


def mixup(image: Tensor, target: Tensor, alpha: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Blend each image and target with its partner's by a share drawn from Beta(alpha, alpha).

    Zhang et al., "mixup: beyond empirical risk minimization" (2017).
    """
    share = float(rng.beta(alpha, alpha))
    return image.lerp(partners(image), share), target.lerp(partners(target), share)


def cutmix(image: Tensor, target: Tensor, alpha: float, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Paste a box of each partner into each image, of a share of its area drawn from Beta(alpha, alpha).

    Yun et al., "CutMix: regularization strategy to train strong classifiers" (2019); the targets follow the share
    of the box that lies within the image.
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
