"""The normalization layers of convolutional networks, by name."""

import math

from torch import nn

from onecurve import check_choice


def norm_layer(norm: str, channels: int) -> nn.Module:
    """Return a normalization layer for (n, channels, height, width) inputs.

    Args:
        norm: `batch` (Ioffe and Szegedy, 2015), or `group` (Wu and He, 2018), which is independent of the batch.
        channels: channels of the input. Group normalization has gcd(32, channels) groups; the paper has 32.
    """
    check_choice("model.norm", norm, ("batch", "group"))
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(math.gcd(32, channels), channels)
