"""Test-time augmentation: a network's logits averaged over views of each image."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from src.utils.errors import UserError, nearest

_KINDS = ("mirror", "shift")


def check_views(kind: str | None) -> None:
    """Find out whether there are such views.

    Raises:
        UserError: if not.
    """
    if kind is not None and kind not in _KINDS:
        raise UserError(f"module.tta={kind} is no test-time augmentation: {nearest(kind, _KINDS)}, or null")


def average_over_views(net: Callable[[Tensor], Tensor], image: Tensor, plain: Tensor, kind: str) -> Tensor:
    """The (n, classes) logits in float32 or better, averaged over views of (n, channels, height, width) images.

    `mirror` is the image and its mirror image; `shift` gives these half of the weight, and the other half to the same
    of the image shifted by a pixel, borders reflected, up and left, and down and right, as in Jordan, "94% on
    CIFAR-10 in 3.29 seconds" (2024).

    Args:
        plain: the logits of the images as they are.
    """
    mirrored = (_precise(plain) + _precise(net(image.flip(-1)))) / 2
    if kind == "mirror":
        return mirrored
    height, width = image.shape[-2:]
    padded = F.pad(image, (1, 1, 1, 1), mode="reflect")
    shifted = [padded[:, :, at : at + height, at : at + width] for at in (0, 2)]
    views = [view for one in shifted for view in (one, one.flip(-1))]
    return mirrored / 2 + sum(_precise(net(view)) for view in views) / (2 * len(views))


def _precise(logits: Tensor) -> Tensor:
    return logits.double() if logits.element_size() == 8 else logits.float()
