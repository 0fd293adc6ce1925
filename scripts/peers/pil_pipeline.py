"""The usual data path, for `scripts.bench`: each image through PIL, one after the other, then the default collate.

It stands for what tutorials write with torchvision: RandomCrop(32, padding=4), RandomHorizontalFlip, ToTensor and
Normalize, in a map-style data set under `DataLoader(shuffle=True)`, in the main process. It does what torchvision would
do to a PIL image, less its checks; with `reflect` also to the border, as `RandomCrop(..., padding_mode="reflect")`
and this template do. The images lie in memory, as in torchvision's CIFAR10: nothing is decoded.
"""

import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from src.data.sources.cifar import CIFAR10

MEAN, STD = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1), torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


class Images(Dataset[tuple[Tensor, int]]):
    """CIFAR-10's training set as (height, width, channels) arrays; an item is one image, augmented, and its label."""

    def __init__(self, folder: Path, reflect: bool) -> None:
        self.reflect = reflect
        images, labels = CIFAR10([]).load(folder, "train")
        self.images, self.labels = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if self.reflect:
            padded = Image.fromarray(np.pad(self.images[place], ((4, 4), (4, 4), (0, 0)), "reflect"))
        else:
            padded = ImageOps.expand(Image.fromarray(self.images[place]), border=4)
        left, top = random.randrange(9), random.randrange(9)
        crop = padded.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            crop = ImageOps.mirror(crop)
        image = torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous().float().div(255)  # ToTensor
        return image.sub_(MEAN).div_(STD), self.labels[place]


def loader(folder: Path, batch_size: int, reflect: bool = False) -> DataLoader[tuple[Tensor, int]]:
    """Batches of the training set, shuffled."""
    return DataLoader(Images(folder, reflect), batch_size, shuffle=True, drop_last=True)
