"""VGG-16 with batch normalisation, for 32 x 32 images.

Simonyan and Zisserman, "Very deep convolutional networks" (2014), configuration D: thirteen 3 x 3 convolutions in five
stages, each halving the image at its end. On CIFAR what is left is one pixel of 512 channels, so one linear layer
takes the place of the three. 14,728,266 parameters for ten classes.
"""

from collections import OrderedDict

from torch import nn

from src.models.norm import norm_layer

_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(num_classes: int, dropout: float = 0.0, norm: str = "batch") -> nn.Sequential:
    """The network as its ordered blocks; it takes (n, 3, 32, 32) images."""
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = 3
    for stage, widths in enumerate(_STAGES, start=1):
        layers: list[nn.Module] = []
        for outputs in widths:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), norm_layer(norm, outputs), nn.ReLU()]
            inputs = outputs
        blocks[f"stage{stage}"] = nn.Sequential(*layers, nn.MaxPool2d(2))
    blocks["head"] = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(inputs, num_classes))
    return nn.Sequential(blocks)
