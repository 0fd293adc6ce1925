"""Networks with a forward pass of their own, as users bring them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BatchNormAct(nn.BatchNorm2d):
    """An activation after torch's forward pass."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input), inplace=True)


class TimmBatchNormAct(nn.BatchNorm2d):
    """A forward pass as that of timm's BatchNormAct2d, which counts the batches itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        momentum = self.momentum or 0.0
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = self.momentum or 1.0 / float(self.num_batches_tracked)
        training = self.training or self.running_mean is None
        args = self.running_mean, self.running_var, self.weight, self.bias, training, momentum, self.eps
        return self.act(F.batch_norm(x, *args))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm, self.dropout = (
            nn.Conv2d(width, width, 3, padding=1),
            BatchNormAct(width),
            nn.Dropout(0.1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.dropout(self.norm(self.conv(x))))


class OwnForward(nn.Module):
    """Operations between the blocks, a module that is called twice, and a last linear layer, as in torchvision."""

    def __init__(self, num_classes: int = 10, width: int = 4) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, width, 3, padding=1), TimmBatchNormAct(width), nn.ReLU()
        self.layer1 = nn.Sequential(Residual(width), Residual(width))
        self.layer2 = nn.Sequential(Residual(width))
        self.fc = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        x = self.relu(self.layer2(F.max_pool2d(self.layer1(x), 2)))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Skips(nn.Module):
    """Skip connections over all blocks, also of the images, and a parameter of the network itself."""

    def __init__(self, num_classes: int = 10, width: int = 4) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width, 1, 1))
        self.stem, self.first, self.second = nn.Conv2d(3, width, 1), Residual(width), Residual(width)
        self.third, self.head = Residual(width), nn.Linear(width + 3, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        start = self.stem(image)
        x = self.second(self.first(start))
        x = self.third(x * self.scale) + start
        return self.head(torch.cat([x, image], 1).mean((2, 3)))


class Tied(nn.Module):
    """Weights of two blocks, and of a block and the network itself, are the same; one block has two names."""

    def __init__(self, num_classes: int = 10, width: int = 4) -> None:
        super().__init__()
        self.stem, self.mix, self.again = nn.Conv2d(3, width, 3), nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.norm, self.head = nn.Sequential(nn.BatchNorm2d(width), nn.ReLU()), nn.Linear(width, num_classes)
        self.again.weight, self.scale, self.alias = self.mix.weight, self.head.bias, self.stem

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.norm(self.mix(F.avg_pool2d(self.alias(x), 4))))
        return self.head(x.mean((2, 3)) * self.scale.exp().mean())


class Unused(OwnForward):
    """A parameter without a gradient; another one has a hook."""

    def __init__(self, num_classes: int = 10, width: int = 4) -> None:
        super().__init__(num_classes, width)
        self.unused = nn.Parameter(torch.zeros(3))
        self.fc.weight.register_hook(_half)


def _half(gradient: Tensor) -> Tensor:
    return gradient / 2


class Wrapper(nn.Module):
    """A network in a network."""

    def __init__(self, num_classes: int = 10, width: int = 4) -> None:
        super().__init__()
        self.backbone = OwnForward(num_classes, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)


class Versioned(nn.Linear):
    """A layer that refuses weights of another version than its own."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        assert local_metadata.get("version") == self._version
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def versioned(num_classes: int = 10) -> nn.Module:
    """Return a network with a versioned layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 16), Versioned(16, num_classes))
