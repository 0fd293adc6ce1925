"""VGG-16 with batch normalization, for 32 x 32 images.

This is configuration D of Simonyan and Zisserman, "Very deep convolutional networks" (2014): thirteen 3 x 3
convolutions in five stages. A max pooling at the end of each stage halves height and width. On CIFAR this leaves one
pixel of 512 channels, so one linear layer replaces the three of the paper. The network has 14,728,266
parameters for ten classes.
"""

from collections import OrderedDict

from torch import nn

from src.models.norm import norm_layer
from src.models.options import check_probabilities

_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(num_classes: int, dropout: float = 0.0, norm: str = "batch", channels: int = 3) -> nn.Sequential:
    """Return the network as a sequence of blocks; it maps (n, channels, 32, 32) images to (n, num_classes) logits."""
    check_probabilities(dropout=dropout)
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = channels
    for stage, widths in enumerate(_STAGES, start=1):
        layers: list[nn.Module] = []
        for outputs in widths:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), norm_layer(norm, outputs), nn.ReLU()]
            inputs = outputs
        blocks[f"stage{stage}"] = nn.Sequential(*layers, nn.MaxPool2d(2))
    blocks["head"] = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(inputs, num_classes))
    return nn.Sequential(blocks)
