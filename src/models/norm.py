"""The normalisation of convolutional networks, by name."""

import math

from torch import nn

from src.utils.errors import UserError, nearest

_KINDS = ("batch", "group")


def norm_layer(kind: str, channels: int) -> nn.Module:
    """`batch` (Ioffe and Szegedy, 2015), or `group` (Wu and He, 2018), which needs no batch to normalise over.

    Groups are 32, as in that paper, or the most that divide the channels.

    Raises:
        UserError: if there is no such normalisation.
    """
    if kind not in _KINDS:
        raise UserError(f"model.norm={kind} is not a normalisation: {nearest(kind, _KINDS)}")
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(math.gcd(32, channels), channels)
