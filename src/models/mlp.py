"""A multi-layer perceptron: the smallest network, for tests and for measuring everything but the network."""

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from src.models.options import check_probabilities, check_sizes


def mlp(
    num_classes: int, image_shape: Sequence[int], hidden: Sequence[int] = (256, 128), dropout: float = 0.0
) -> nn.Sequential:
    """Return the network as a sequence of blocks; it maps (n, *image_shape) images to (n, num_classes) logits.

    Args:
        image_shape: (channels, height, width) of the images.
        hidden: units of each hidden layer.
        dropout: probability of dropping a unit of a hidden layer.
    """
    check_sizes(hidden=hidden)
    check_probabilities(dropout=dropout)
    blocks: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = math.prod(image_shape)
    for number, units in enumerate(hidden, start=1):
        blocks[f"layer{number}"] = nn.Sequential(nn.Linear(width, units), nn.ReLU(), nn.Dropout(dropout))
        width = units
    blocks["head"] = nn.Linear(width, num_classes)
    return nn.Sequential(blocks)
