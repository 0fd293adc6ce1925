"""ResNet-18 with pre-activation: normalization and ReLU come before each convolution.

The block is that of He et al., "Identity mappings in deep residual networks" (2016). The size is that of the CIFAR
network in Zhang et al., "mixup: beyond empirical risk minimization" (2017): 11,172,170 parameters for ten classes.
"""

from collections import OrderedDict

from torch import Tensor, nn

from src.models.norm import norm_layer


def preact_resnet18(num_classes: int, norm: str = "batch", channels: int = 3) -> nn.Sequential:
    """Return the network as a sequence of blocks; it maps (n, channels, 32, 32) images to (n, num_classes) logits."""
    blocks: OrderedDict[str, nn.Module] = OrderedDict(stem=_convolution(channels, 64))
    inputs = 64
    for stage, outputs in enumerate((64, 128, 256, 512)):
        first = PreActBlock(inputs, outputs, 2 if stage else 1, norm)
        blocks[f"layer{stage + 1}"] = nn.Sequential(first, PreActBlock(outputs, outputs, 1, norm))
        inputs = outputs
    blocks["head"] = nn.Sequential(
        norm_layer(norm, inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes)
    )
    return nn.Sequential(blocks)


class PreActBlock(nn.Module):
    """A residual block: normalization, ReLU and a 3 x 3 convolution, and the same again.

    If the shape changes, the shortcut is a 1 x 1 convolution of the first ReLU's output. Otherwise it is the input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.activation = nn.Sequential(norm_layer(norm, inputs), nn.ReLU())
        between = [norm_layer(norm, outputs), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
        self.branch = nn.Sequential(_convolution(inputs, outputs, stride), *between, _convolution(outputs, outputs))
        changes_shape = stride != 1 or inputs != outputs
        self.projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if changes_shape else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(x)
        return self.branch(y) + (x if self.projection is None else self.projection(y))


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
