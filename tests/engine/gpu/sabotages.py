"""Callbacks that put a host-device synchronization into a training step: the first line of `synchronize`."""

from typing import Any

import lightning as L
import torch
from torch import Tensor


class ItemInLoss(L.Callback):
    """Reads the loss on the host."""

    @staticmethod
    def synchronize(loss: Tensor) -> None:
        loss.item()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        compute = pl_module.loss

        def loss(outputs: Tensor, batch: Any) -> Tensor:
            value = compute(outputs, batch)
            self.synchronize(value)
            return value

        pl_module.loss = loss


class MaskInAugmentation(L.Callback):
    """Selects pixels by a boolean mask."""

    @staticmethod
    def synchronize(pixels: Tensor) -> None:
        pixels[pixels > 0].sum()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        augmentation: Any = trainer.datamodule.augment
        augment = augmentation.augment_pixels

        def augment_pixels(*args: Any) -> Tensor:
            pixels = augment(*args)
            self.synchronize(pixels)
            return pixels

        augmentation.augment_pixels = augment_pixels


class MaskedAssignment(L.Callback):
    """Assigns to the elements that a boolean mask selects."""

    @staticmethod
    def synchronize(x: Tensor) -> None:
        x[x > 0] = torch.ones(len(x), device=x.device)

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self.synchronize(torch.zeros(8, device=loss.device))


class CopyToDevice(L.Callback):
    """Sends a tensor from pageable memory, which is also one more operation."""

    @staticmethod
    def synchronize(device: torch.device) -> None:
        torch.ones(1).to(device)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.synchronize(pl_module.device)
