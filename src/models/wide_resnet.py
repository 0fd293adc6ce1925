"""Wide residual networks: few layers with many channels.

Zagoruyko and Komodakis, "Wide residual networks" (2016). WRN-28-10 has 28 layers in three groups of four blocks, ten
times the channels of the thin network, and 36,479,194 parameters for ten classes. Dropout is between the two
convolutions of a block; the paper's runs with dropout use 0.3.
"""

from collections import OrderedDict

from torch import nn

from onecurve import UserError
from src.models.norm import norm_layer
from src.models.options import check_probabilities, check_sizes
from src.models.preact_resnet import PreActBlock


def wide_resnet(
    num_classes: int,
    depth: int = 28,
    width: int = 10,
    dropout: float = 0.0,
    norm: str = "batch",
    channels: int = 3,
) -> nn.Sequential:
    """Return the network as a sequence of blocks; it maps (n, channels, 32, 32) images to (n, num_classes) logits.

    Args:
        depth: number of layers, 6 n + 4.
        width: channels in multiples of 16, 32 and 64 in the three groups.
        dropout: probability of dropping an element between the two convolutions of a block.
        norm: `batch` or `group`.
    """
    if depth < 10 or (depth - 4) % 6:
        raise UserError(f"model.depth={depth}: a wide ResNet has 6 n + 4 layers; take 10, 16, 22, 28 or 40")
    check_sizes(width=width)
    check_probabilities(dropout=dropout)
    blocks: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Conv2d(channels, 16, 3, padding=1, bias=False))
    inputs = 16
    for group in range(3):
        layers, outputs = [], 16 * width * 2**group
        for number in range((depth - 4) // 6):
            layers.append(PreActBlock(inputs, outputs, 2 if group and number == 0 else 1, norm, dropout))
            inputs = outputs
        blocks[f"layer{group + 1}"] = nn.Sequential(*layers)
    blocks["head"] = nn.Sequential(
        norm_layer(norm, inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes)
    )
    return nn.Sequential(blocks)
