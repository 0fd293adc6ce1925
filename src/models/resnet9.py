"""ResNet-9, the small and fast default network.

Page, "How to train your ResNet" (2018): a convolution, then three stages that halve height and width. Two of the stages
have a residual branch. Page's network has a width of 64; a width of 16 suits a CPU.
"""

from collections import OrderedDict

from torch import Tensor, nn

from src.models.norm import norm_layer
from src.models.options import check_sizes


def resnet9(num_classes: int, width: int = 16, norm: str = "batch", channels: int = 3) -> nn.Sequential:
    """Return the network as a sequence of blocks; it maps (n, channels, 32, 32) images to (n, num_classes) logits.

    Args:
        width: channels of the first convolution.
        norm: `batch` or `group`.
    """
    check_sizes(width=width)
    return nn.Sequential(
        OrderedDict(
            stem=_convolution(channels, width, norm),
            layer1=nn.Sequential(_halving(width, 2 * width, norm), _Residual(2 * width, norm)),
            layer2=_halving(2 * width, 4 * width, norm),
            layer3=nn.Sequential(_halving(4 * width, 8 * width, norm), _Residual(8 * width, norm)),
            head=nn.Sequential(_GlobalMax(), nn.Flatten(), nn.Linear(8 * width, num_classes), _Scale(0.125)),
        )
    )


class _Residual(nn.Module):
    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.branch = nn.Sequential(_convolution(channels, channels, norm), _convolution(channels, channels, norm))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


class _GlobalMax(nn.Module):
    """The maximum of each channel, (n, channels, height, width) to (n, channels, 1, 1).

    torch's own pooling layer has no deterministic gradient on GPUs.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.amax((2, 3), keepdim=True)


class _Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def _convolution(inputs: int, outputs: int, norm: str) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return nn.Sequential(convolution, norm_layer(norm, outputs), nn.ReLU())


def _halving(inputs: int, outputs: int, norm: str) -> nn.Sequential:
    return nn.Sequential(_convolution(inputs, outputs, norm), nn.MaxPool2d(2))
