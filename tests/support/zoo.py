"""Small networks of 32x32 images as users bring them, each with the feature that its name says, and modules."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecurve import Batch
from src.models.classifier import ImageClassifier
from tests.support.layers import CLASSES, LAYERS, WIDTH, Centered, Residual, conv, conv_norm, head, stem


def residuals(layer: str) -> nn.Module:
    """Return a network of five blocks, three of which have a layer of `LAYERS`."""
    return nn.Sequential(stem(), *(Residual(LAYERS[layer]()) for _ in range(3)), head())


class FourBlocks(nn.Module):
    """Base of the networks with operations between their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second, self.head = stem(), conv_norm(), conv_norm(), head()

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(self.between(self.stem(image)))
        return self.head(self.second(self.between(x)))

    def between(self, x: Tensor) -> Tensor:
        return x


# Ordinary networks


class UNet(nn.Module):
    """Ronneberger et al. (2015): skip connections between the halves of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.middle = stem(), conv_norm(), conv_norm()
        self.up, self.last, self.head = conv_norm(2 * WIDTH), conv_norm(2 * WIDTH), head()

    def forward(self, image: Tensor) -> Tensor:
        first = self.stem(image)
        second = self.down(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.up(torch.cat([F.interpolate(x, scale_factor=2), second], 1))
        return self.head(self.last(torch.cat([F.interpolate(x, scale_factor=2), first], 1)))


class DenseNet(nn.Module):
    """Huang et al. (2017): each layer gets the outputs of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second, self.third = (stem(), *(conv_norm(n * WIDTH) for n in (1, 2, 3)))
        self.head = head(4 * WIDTH)

    def forward(self, image: Tensor) -> Tensor:
        features = [self.stem(image)]
        for layer in (self.first, self.second, self.third):
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1))


class ClassToken(nn.Module):
    """A vision transformer with blocks of `LAYERS`: Dosovitskiy et al. (2021)."""

    def __init__(self, layer: str = "attention") -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 8, stride=8)
        self.token, self.position = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH))
        self.blocks, self.head = nn.Sequential(*(LAYERS[layer]() for _ in range(3))), nn.Linear(WIDTH, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.blocks(x)[:, 0])


class Skips(nn.Module):
    """Skip connections over all blocks, also of the images, and a parameter of the network itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, 1, 1))
        self.stem, self.first, self.second = nn.Conv2d(3, WIDTH, 1), Residual(nn.ReLU()), Residual(nn.ReLU())
        self.third, self.head = Residual(nn.BatchNorm2d(WIDTH)), nn.Linear(WIDTH + 3, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        start = self.stem(image)
        x = self.third(self.second(self.first(start)) * self.scale) + start
        return self.head(torch.cat([x, image], 1).mean((2, 3)))


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.conv(F.relu(self.conv(x))))


def shared_in_block() -> nn.Module:
    return nn.Sequential(stem(), CalledTwice(), CalledTwice(), head())


def frozen_layers() -> nn.Module:
    """The first block is frozen, its batch statistics are not; and so is a layer in the middle."""
    net = nn.Sequential(conv_norm(3), nn.MaxPool2d(4), conv_norm(), conv_norm(), head())
    for part in (net[0], net[2][0]):  # type: ignore[index]
        part.requires_grad_(False)
    return net


def frozen_block() -> nn.Module:
    """Of four blocks, the third is frozen: at four stages it is a stage."""
    net = nn.Sequential(stem(), conv_norm(), conv_norm(), head())
    net[2].requires_grad_(False)
    return net


class LoopedList(nn.Module):
    """Layers in lists, as in many repositories."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = stem(), head()
        self.convs = nn.ModuleList(conv() for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(WIDTH) for _ in range(3))

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for layer, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(layer(x)))
        return self.head(x)


def inplace_relu() -> nn.Module:
    layers = [part for _ in range(3) for part in (conv(), nn.ReLU(inplace=True), nn.BatchNorm2d(WIDTH))]
    pool = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES)]
    return nn.Sequential(stem(), nn.ReLU(inplace=True), *layers, nn.ReLU(inplace=True), *pool)


class Coupling(nn.Module):
    """A reversible block: Gomez et al. (2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv_norm()

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[1], pair[0] + self.conv(pair[1])


class Duplicate(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.relu()


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def tuples() -> nn.Module:
    return nn.Sequential(stem(), Duplicate(), Coupling(), Coupling(), Coupling(), Join(), head())


def tied() -> nn.Module:
    """The last block has the filters of the first one."""
    net: Any = residuals("relu")
    net[3].conv.weight = net[1].conv.weight
    return net


class Tied(nn.Module):
    """Weights of two blocks, and of a block and the network itself, are the same; one block has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix, self.again = nn.Conv2d(3, WIDTH, 3), nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, WIDTH, 1)
        self.norm, self.head = nn.Sequential(nn.BatchNorm2d(WIDTH), nn.ReLU()), nn.Linear(WIDTH, CLASSES)
        self.again.weight, self.scale, self.alias = self.mix.weight, self.head.bias, self.stem

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.norm(self.mix(F.avg_pool2d(self.alias(x), 4))))
        return self.head(x.mean((2, 3)) * self.scale.exp().mean())


class Unused(FourBlocks):
    """A layer for another task has no part in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.auxiliary = nn.Linear(WIDTH, WIDTH)


# Operations between blocks


class NoGrad(FourBlocks):
    def between(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = 1 / (1 + x.square().mean((1, 2, 3), keepdim=True))
        return x * scale


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class GradientReversal(FourBlocks):
    """Ganin and Lempitsky (2015)."""

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.second(_Reverse.apply(self.first(self.stem(image)))))


class RowsOfParameter(FourBlocks):
    """A tensor of a parameter has as many rows as a micro-batch of four samples, but none of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, image: Tensor) -> Tensor:
        weight = self.mixing.softmax(1)
        x = self.first(torch.einsum("nchw,dc->ndhw", self.stem(image), weight))
        return self.head(torch.einsum("nchw,dc->ndhw", self.second(x), weight))


class Annealed(FourBlocks):
    """A number of the network, which the module `Anneals` changes."""

    scale = 1.0

    def between(self, x: Tensor) -> Tensor:
        return x * self.scale


class SharedNorm(FourBlocks):
    """A layer without parameters that two stages call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(WIDTH, affine=False)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


class MovingAverage(FourBlocks):
    """A buffer of the network itself, updated in its own forward pass."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    between = Centered.forward


class Reparameterized(FourBlocks):
    """A variational network: Kingma and Welling (2014)."""

    def between(self, x: Tensor) -> Tensor:
        mean, log_var = x.chunk(2, 1)
        noise = torch.randn_like(mean) if self.training else torch.zeros_like(mean)
        return torch.cat([mean + noise * (log_var / 2).exp(), mean], 1)


# Layers inside blocks


def hooked() -> nn.Module:
    """Halve the gradient of one weight in a hook."""
    net: Any = residuals("relu")
    net[2].conv.weight.register_hook(lambda gradient: gradient / 2)
    return net


# Modules


class L1Penalty(ImageClassifier):
    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        penalty = sum(weight.abs().sum() for weight in self.net.parameters())
        return super().loss(outputs, batch) + 1e-3 * penalty


class Temperature(ImageClassifier):
    """Trains a parameter of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.temperature = nn.Parameter(torch.ones(()))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return super().loss(outputs / self.temperature, batch)

    def configure_optimizers(self) -> Any:
        return {"optimizer": torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)}


class HalvesImages(ImageClassifier):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return super().training_step(batch._replace(image=batch.image * 0.5), batch_idx)


class OwnBackward(ImageClassifier):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss / 2).backward()


class OwnClipping(ImageClassifier):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Anneals(ImageClassifier):
    def on_train_epoch_start(self) -> None:
        net: Any = self.net
        net.scale = 1 / (1 + self.current_epoch)
