"""The generator and the discriminator of DCGAN, for 32 x 32 images.

Radford, Metz and Chintala, "Unsupervised representation learning with deep convolutional generative adversarial
networks" (2015). The networks have one stage less than those of the paper, which are for 64 x 64 images. With a width
of 64 and 100 latent values they have 1,068,928 and 663,296 parameters.
"""

from collections import OrderedDict

from torch import nn


def generator(latent: int = 100, width: int = 64) -> nn.Sequential:
    """Return the generator, which maps (n, latent) noise to (n, 3, 32, 32) images in [-1, 1].

    Args:
        latent: noise values per image.
        width: channels of the last hidden layer.
    """
    net = nn.Sequential(
        OrderedDict(
            start=nn.Sequential(nn.Unflatten(1, (latent, 1, 1)), *_doubling(latent, 4 * width, stride=1, padding=0)),
            layer1=nn.Sequential(*_doubling(4 * width, 2 * width)),
            layer2=nn.Sequential(*_doubling(2 * width, width)),
            image=nn.Sequential(nn.ConvTranspose2d(width, 3, 4, stride=2, padding=1, bias=False), nn.Tanh()),
        )
    )
    return net.apply(_initialize)


def discriminator(width: int = 64) -> nn.Sequential:
    """Return the discriminator, which maps (n, 3, 32, 32) images to (n,) logits, greater for real images.

    Args:
        width: channels of the first layer.
    """
    net = nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(nn.Conv2d(3, width, 4, stride=2, padding=1, bias=False), nn.LeakyReLU(0.2)),
            layer1=nn.Sequential(*_halving(width, 2 * width)),
            layer2=nn.Sequential(*_halving(2 * width, 4 * width)),
            head=nn.Sequential(nn.Conv2d(4 * width, 1, 4, bias=False), nn.Flatten(0)),
        )
    )
    return net.apply(_initialize)


def _doubling(inputs: int, outputs: int, stride: int = 2, padding: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.ConvTranspose2d(inputs, outputs, 4, stride=stride, padding=padding, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU()


def _halving(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, 4, stride=2, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)


def _initialize(part: nn.Module) -> None:
    if isinstance(part, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(part.weight, std=0.02)
    if isinstance(part, nn.BatchNorm2d):
        nn.init.normal_(part.weight, mean=1.0, std=0.02)
