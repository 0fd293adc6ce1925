"""The normalization layers of convolutional networks, by name."""

import math

from torch import nn

from src.utils.errors import UserError, nearest

_KINDS = ("batch", "group")


def norm_layer(kind: str, channels: int) -> nn.Module:
    """Return a normalization layer for (n, channels, height, width) inputs.

    Args:
        kind: `batch` (Ioffe and Szegedy, 2015), or `group` (Wu and He, 2018), which is independent of the batch.
        channels: channels of the input. Group normalization has gcd(32, channels) groups; the paper has 32.

    Raises:
        UserError: if there is no such normalization.
    """
    if kind not in _KINDS:
        raise UserError(f"model.norm={kind} is not a normalization: {nearest(kind, _KINDS)}")
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(math.gcd(32, channels), channels)
