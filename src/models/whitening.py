"""A first layer whose frozen filters whiten small image patches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Whitening(nn.Conv2d):
    """A convolution that projects patches onto their principal components, scaled to standard deviation one.

    Each filter occurs with both signs. The method is from Page, "How to train your ResNet" (2018); the bias and the two
    signs are from tysam-code/hlb-CIFAR10 (2023). The filters are frozen. Until the caller stores the result of
    `compute_filters`, they are the initial filters of a convolution.

    Attributes:
        trains_bias: whether the bias gets a gradient. Without it, the backward pass needs no gradient of this layer's
            output, which is the largest in the network.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__(channels, 2 * channels * size**2, size)
        self.weight.requires_grad_(False)
        self.trains_bias = True

    @property
    def has_computed_filters(self) -> bool:
        """Whether the filters come in pairs of opposite sign, as `compute_filters` returns them."""
        positive, negative = self.weight.chunk(2)
        return torch.equal(positive, -negative)

    def compute_filters(self, images: Tensor, eps: float = 5e-4) -> Tensor:
        """Return the (outputs, channels, size, size) filters for normalized images; the caller stores them.

        Args:
            images: (n, channels, height, width) normalized images.
            eps: constant added to the variances, which limits the scale of components with little variance.
        """
        patches = F.unfold(images, self.kernel_size).transpose(1, 2).flatten(0, 1).double()
        covariance = patches.T @ patches / len(patches)
        values, vectors = torch.linalg.eigh(covariance)
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        # The sign of an eigenvector depends on the linear algebra library, so this fixes it.
        vectors = vectors * largest.sign()
        filters = (vectors / (values + eps).sqrt()).T.reshape(-1, *self.weight.shape[1:])
        return torch.cat([filters, -filters])

    def forward(self, input: Tensor) -> Tensor:
        bias = self.bias if self.trains_bias or self.bias is None else self.bias.detach()
        return self._conv_forward(input, self.weight, bias)
