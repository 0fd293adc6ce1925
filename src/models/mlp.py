"""A multi-layer perceptron: the smallest model, for trying things out and for measuring everything but the network."""

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn


def mlp(
    num_classes: int, image_shape: Sequence[int], hidden: Sequence[int] = (256, 128), dropout: float = 0.0
) -> nn.Sequential:
    """The network as its ordered blocks; it takes images of `image_shape` (channels, height, width)."""
    blocks: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = math.prod(image_shape)
    for number, units in enumerate(hidden, start=1):
        blocks[f"layer{number}"] = nn.Sequential(nn.Linear(width, units), nn.ReLU(), nn.Dropout(dropout))
        width = units
    blocks["head"] = nn.Linear(width, num_classes)
    return nn.Sequential(blocks)
