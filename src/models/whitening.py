"""A first layer whose frozen filters whiten small patches of the images."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Whitening(nn.Conv2d):
    """Each patch in the basis of its principal components, each scaled to deviation one, and all of it negated.

    Page, "How to train your ResNet" (2018); with the bias, and both signs, tysam-code/hlb-CIFAR10 (2023). The filters
    are frozen; until they are fitted they are a convolution's initial ones.

    Attributes:
        trains_bias: whether the bias gets a gradient. Without, none need be computed for the layer's output either,
            which is the largest in the network.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__(channels, 2 * channels * size**2, size)
        self.weight.requires_grad_(False)
        self.trains_bias = True

    @property
    def fitted(self) -> bool:
        """Whether the filters come in pairs of both signs, as those do that were computed from images."""
        positive, negative = self.weight.chunk(2)
        return torch.equal(positive, -negative)

    def fit(self, images: Tensor, eps: float = 5e-4) -> Tensor:
        """The filters for normalised images, (n, channels, height, width)."""
        patches = F.unfold(images, self.kernel_size).transpose(1, 2).flatten(0, 1).double()
        covariance = patches.T @ patches / len(patches)
        values, vectors = torch.linalg.eigh(covariance)
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        vectors = vectors * largest.sign()  # an eigenvector's sign is the library's choice
        filters = (vectors / (values + eps).sqrt()).T.reshape(-1, *self.weight.shape[1:])
        return torch.cat([filters, -filters])

    def forward(self, input: Tensor) -> Tensor:
        bias = self.bias if self.trains_bias or self.bias is None else self.bias.detach()
        return self._conv_forward(input, self.weight, bias)
