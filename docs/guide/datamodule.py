"""The images of the guide for this template: `python train.py experiment=guide`."""

from collections.abc import Iterator, Sized
from typing import Any

import lightning as L
from torch.utils.data import DataLoader, Sampler

from docs.guide.experiment import BATCH, IMAGES, TEST_IMAGES, images, order


class EpochOrder(Sampler[int], Sized):
    """The positions of an epoch as the scripts of the guide draw them."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return IMAGES

    def __iter__(self) -> Iterator[int]:
        yield from order(self.epoch).tolist()


class GuideData(L.LightningDataModule):
    """A plain LightningDataModule; the batch size is that of an optimizer step, over all processes."""

    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(images(), self.batch_size, sampler=EpochOrder())

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(images(TEST_IMAGES, seed=1), self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(images(TEST_IMAGES, seed=2), self.batch_size)
