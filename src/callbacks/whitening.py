"""The whitening layer of a network: its filters computed as the run starts, its bias trained for a while."""

from typing import Any

import lightning as L
import torch

from src.data.augment.pixels import normalize
from src.models.whitening import Whitening
from src.utils.errors import UserError


class InitWhitening(L.Callback):
    """Computes the filters from training images, before a strategy takes the network apart.

    Every rank gets those of the first. A network that comes with filters, from a run that is continued or that it
    starts from (`init_from`), keeps them.

    Args:
        images: how many to look at.
        bias_fraction: share of the run in which the layer's bias is trained.

    Raises:
        UserError: if the network has no such layer.
    """

    def __init__(self, images: int = 5000, bias_fraction: float = 1.0) -> None:
        self.images, self.bias_fraction = images, bias_fraction
        self._layers: list[Whitening] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._layers = [part for part in pl_module.modules() if isinstance(part, Whitening)]
        if not self._layers:
            raise UserError("callbacks.whitening: `model` has no whitening layer; take model=airbench, or leave it out")
        data: Any = trainer.datamodule
        split = data.splits["train"]
        for layer in self._layers:
            if not layer.fitted:
                image = split[torch.arange(min(self.images, len(split)))].image
                filters = layer.fit(normalize(image, data.mean, data.std, torch.float32))
                layer.weight.data.copy_(trainer.strategy.broadcast(filters))

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        data: Any = trainer.datamodule
        for layer in self._layers:
            layer.trains_bias = trainer.global_step < self.bias_fraction * data.total_steps
