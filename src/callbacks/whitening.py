"""Compute the filters of a whitening layer when a run starts, and train its bias for a part of the run."""

from typing import Any

import lightning as L
import torch

from src.data.augment.pixels import normalize
from src.models.whitening import Whitening
from src.utils.errors import UserError


class InitWhitening(L.Callback):
    """Computes the filters from training images, before a strategy shards or splits the network.

    A rank with a GPU computes there. All ranks get the filters of rank zero. Filters that were loaded from a checkpoint
    (`ckpt_path` or `init_from`) are kept.

    Args:
        images: number of training images for the computation.
        bias_fraction: fraction of the run in which the layer's bias is trained.

    Raises:
        UserError: if the network has no whitening layer.
    """

    def __init__(self, images: int = 5000, bias_fraction: float = 1.0) -> None:
        self.images, self.bias_fraction = images, bias_fraction
        self._layers: list[Whitening] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._layers = [part for part in pl_module.modules() if isinstance(part, Whitening)]
        if not self._layers:
            raise UserError("callbacks.whitening: `model` has no whitening layer; use model=airbench, or omit it")
        data: Any = trainer.datamodule
        split = data.splits["train"]
        for layer in self._layers:
            if not layer.has_computed_filters:
                images = split[torch.arange(min(self.images, len(split)))].image
                images = images.to(_computing_device(trainer.strategy.root_device))
                filters = layer.compute_filters(normalize(images, data.mean, data.std, torch.float32))
                layer.weight.data.copy_(trainer.strategy.broadcast(filters.cpu()))

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        data: Any = trainer.datamodule
        for layer in self._layers:
            layer.trains_bias = trainer.global_step < self.bias_fraction * data.total_steps


def _computing_device(root: torch.device) -> torch.device:
    """Return the rank's device if it is CUDA: it computes in float64, which not all other devices have."""
    return root if root.type == "cuda" else torch.device("cpu")
