"""A first layer whose frozen filters whiten small image patches, and the callback that computes the filters."""

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecurve import UserError
from src.data.augment.pixels import normalize


class Whitening(nn.Conv2d):
    """A convolution that projects patches onto their principal components, scaled to standard deviation one.

    Each filter occurs with both signs. The method is from Page, "How to train your ResNet" (2018); the bias and the two
    signs are from tysam-code/hlb-CIFAR10 (2023). The filters are frozen. Until the caller stores the result of
    `compute_filters`, they are the initial filters of a convolution. `optimizer.whitening_fraction` of Muon is the part
    of the run in which the bias is trained.
    """

    def __init__(self, channels: int, size: int) -> None:
        super().__init__(channels, 2 * channels * size**2, size)
        self.weight.requires_grad_(False)

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


class InitWhitening(L.Callback):
    """Computes the filters from training images, before a strategy shards or splits the network.

    A rank with a GPU computes there. All ranks get the filters of rank zero. Filters that were loaded from a checkpoint
    (`ckpt_path` or `init_from`) are kept.

    Args:
        images: number of training images for the computation.
    """

    def __init__(self, images: int = 5000) -> None:
        self.images = images

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        layers = [part for part in pl_module.modules() if isinstance(part, Whitening)]
        if not layers:
            raise UserError("callbacks.whitening: `model` has no whitening layer; use model=airbench, or omit it")
        for layer in layers:
            if not layer.has_computed_filters:
                filters = layer.compute_filters(self._training_images(trainer))
                layer.weight.data.copy_(trainer.strategy.broadcast(filters.cpu()))

    def _training_images(self, trainer: L.Trainer) -> Tensor:
        """Return normalized images on the rank's device if it is CUDA: other devices may lack float64."""
        data: Any = trainer.datamodule
        split, device = data.splits["train"], trainer.strategy.root_device
        images = split.fetch(torch.arange(min(self.images, len(split)))).image
        images = images.to(device if device.type == "cuda" else "cpu")
        return normalize(images, data.mean, data.std, torch.float32)
