"""ResNet-18, -34 and -50 with a stem for 32 x 32 images.

These are the ImageNet networks in table 1 of He et al., "Deep residual learning for image recognition" (2015). As is
usual on CIFAR, the first convolution is 3 x 3 with stride 1, without pooling after it. In the bottlenecks the stride is
on the 3 x 3 convolution. The networks have 11,173,962, 21,282,122 and 23,520,842 parameters for ten classes.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from src.models.norm import norm_layer


def resnet18(num_classes: int, norm: str = "batch", channels: int = 3) -> nn.Sequential:
    """Return the network as a sequence of blocks; it maps (n, channels, 32, 32) images to (n, num_classes) logits."""
    return _resnet(_basic, (2, 2, 2, 2), num_classes, norm, channels)


def resnet34(num_classes: int, norm: str = "batch", channels: int = 3) -> nn.Sequential:
    """Return the network as a sequence of blocks; it maps (n, channels, 32, 32) images to (n, num_classes) logits."""
    return _resnet(_basic, (3, 4, 6, 3), num_classes, norm, channels)


def resnet50(num_classes: int, norm: str = "batch", channels: int = 3) -> nn.Sequential:
    """Return the network as a sequence of blocks; it maps (n, channels, 32, 32) images to (n, num_classes) logits."""
    return _resnet(_bottleneck, (3, 4, 6, 3), num_classes, norm, channels, expansion=4)


class _Residual(nn.Module):
    """The sum of a branch of convolutions and its shortcut, followed by ReLU."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.relu = branch, shortcut, nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.branch(x) + self.shortcut(x))


def _basic(inputs: int, outputs: int, stride: int, norm: str) -> nn.Sequential:
    first, second = _convolution(inputs, outputs, 3, stride, norm), _convolution(outputs, outputs, 3, 1, norm)
    return nn.Sequential(first, nn.ReLU(), second)


def _bottleneck(inputs: int, outputs: int, stride: int, norm: str) -> nn.Sequential:
    narrow = outputs // 4
    reduce, middle = _convolution(inputs, narrow, 1, 1, norm), _convolution(narrow, narrow, 3, stride, norm)
    return nn.Sequential(reduce, nn.ReLU(), middle, nn.ReLU(), _convolution(narrow, outputs, 1, 1, norm))


def _convolution(inputs: int, outputs: int, size: int, stride: int, norm: str) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(convolution, norm_layer(norm, outputs))


def _resnet(
    branch: Callable[[int, int, int, str], nn.Module],
    depths: Sequence[int],
    num_classes: int,
    norm: str,
    channels: int,
    expansion: int = 1,
) -> nn.Sequential:
    stem = nn.Sequential(_convolution(channels, 64, 3, 1, norm), nn.ReLU())
    blocks: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    inputs = 64
    for stage, depth in enumerate(depths):
        layers, outputs = [], expansion * 64 * 2**stage
        for number in range(depth):
            stride = 2 if stage > 0 and number == 0 else 1
            keeps_shape = stride == 1 and inputs == outputs
            shortcut = nn.Identity() if keeps_shape else _convolution(inputs, outputs, 1, stride, norm)
            layers.append(_Residual(branch(inputs, outputs, stride, norm), shortcut))
            inputs = outputs
        blocks[f"layer{stage + 1}"] = nn.Sequential(*layers)
    blocks["head"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, num_classes))
    return nn.Sequential(blocks)
