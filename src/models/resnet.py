"""ResNet-18 with the stem that suits 32 x 32 pictures.

He et al., "Deep residual learning for image recognition" (2015): the ImageNet network of table 1, its first
convolution 3 x 3 with stride 1 and no pooling after it, as is usual on CIFAR. 11,173,962 parameters for ten classes.
"""

from collections import OrderedDict

from torch import Tensor, nn


def resnet18(num_classes: int) -> nn.Sequential:
    """The network as its ordered blocks; it takes (n, 3, 32, 32) pictures."""
    return nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(_convolution(3, 64), nn.BatchNorm2d(64), nn.ReLU()),
            layer1=nn.Sequential(_BasicBlock(64, 64), _BasicBlock(64, 64)),
            layer2=nn.Sequential(_BasicBlock(64, 128, stride=2), _BasicBlock(128, 128)),
            layer3=nn.Sequential(_BasicBlock(128, 256, stride=2), _BasicBlock(256, 256)),
            layer4=nn.Sequential(_BasicBlock(256, 512, stride=2), _BasicBlock(512, 512)),
            head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes)),
        )
    )


class _BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = _convolution(inputs, outputs, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = _convolution(outputs, outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
