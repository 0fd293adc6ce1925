"""Projects as users bring them: plain LightningDataModules and LightningModules for regression and segmentation.

`src/data/brackets.py` and `src/models/brackets.py` are one more, for text.
"""

import random
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler, random_split


class NoisyPoints(Dataset[tuple[Tensor, Tensor]]):
    """Points and a function of them, with noise from each of the three global generators."""

    def __init__(self, count: int = 110) -> None:
        self.points = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.points[index]
        noise = 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x + noise, torch.stack([x.square().sum(), x.prod()])


class RegressionData(L.LightningDataModule):
    """In the style of lightning-hydra-template: it divides its batch by the number of processes."""

    def __init__(self, batch_size: int = 16, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.batch_size_per_device, self.weighted, self.options = batch_size, weighted, options

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        if self.hparams["batch_size"] % self.trainer.world_size:
            raise RuntimeError("the batch does not divide")
        self.batch_size_per_device = self.hparams["batch_size"] // self.trainer.world_size
        self.train, self.val, self.test = random_split(NoisyPoints(), [80, 17, 13])  # without a generator

    def train_dataloader(self) -> DataLoader[Any]:
        if not self.weighted:
            return DataLoader(self.train, self.batch_size_per_device, shuffle=True, **self.options)
        sampler = WeightedRandomSampler(torch.linspace(0, 1, 80).tolist(), 80)
        return DataLoader(self.train, self.batch_size_per_device, sampler=sampler, **self.options)

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(part, self.batch_size_per_device, **self.options) for part in (self.val, self.test)]

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, self.batch_size_per_device, **self.options)


class Regression(L.LightningModule):
    def __init__(self, hidden: int = 12) -> None:
        super().__init__()
        layers = [nn.Linear(6, hidden), nn.Tanh(), nn.Dropout(0.2), nn.Linear(hidden, hidden), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(hidden, 2))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.smooth_l1_loss(outputs, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net(2 * batch[0]), batch)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        name = ("val/loss", "val/other")[dataloader_idx]
        loss = self.loss(self.net(2 * batch[0]), batch)
        self.log(name, loss, batch_size=len(batch[0]), sync_dist=True, add_dataloader_idx=False)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(self.net(2 * batch[0]), batch)
        self.log("test/loss", loss, batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Blobs(Dataset[dict[str, Tensor]]):
    """Images of a bright square, its mask, flipped together at random; an item is a dictionary."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        rng = np.random.default_rng(self.first + index)
        top, left = (int(value) for value in rng.integers(0, 5, 2))
        mask = torch.zeros(8, 8)
        mask[top : top + 3, left : left + 3] = 1
        image = mask + torch.from_numpy(rng.normal(0, 0.3, (3, 8, 8))).float()
        if random.random() < 0.5:
            image, mask = image.flip(-1), mask.flip(-1)
        return {"image": image, "mask": mask}


def segmentation_data(batch_size: int = 16) -> L.LightningDataModule:
    return L.LightningDataModule.from_datasets(Blobs(0, 90), Blobs(1000, 19), Blobs(2000, 13), batch_size=batch_size)


class Segmentation(L.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        middle = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Dropout(0.1))
        self.net = nn.Sequential(down, nn.MaxPool2d(2), middle, nn.Upsample(scale_factor=2), nn.Conv2d(width, 1, 1))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs[:, 0], batch["mask"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net(batch["image"]), batch)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(self.net(batch["image"]), batch)
        self.log("val/loss", loss, batch_size=len(batch["mask"]), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(self.net(batch["image"]), batch)
        self.log("test/loss", loss, batch_size=len(batch["mask"]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
