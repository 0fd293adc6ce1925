"""The data path of tutorials, for `scripts.dev.bench`: image by image through PIL, then the default collate.

It is equivalent to torchvision's RandomCrop(32, padding=4), RandomHorizontalFlip, ToTensor and Normalize in a map-style
dataset under `DataLoader(shuffle=True)`, in the main process and without torchvision's checks. `reflect` pads as
`RandomCrop(..., padding_mode="reflect")` and this template do. Images are in memory, as in torchvision's CIFAR10, so
nothing is decoded.
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
    """CIFAR-10's training set as (height, width, channels) arrays; an item is an augmented image and its label."""

    def __init__(self, folder: Path, reflect: bool) -> None:
        self.reflect = reflect
        images, labels = CIFAR10([]).load(folder, "train")
        self.images, self.labels = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.reflect:
            padded = Image.fromarray(np.pad(self.images[index], ((4, 4), (4, 4), (0, 0)), "reflect"))
        else:
            padded = ImageOps.expand(Image.fromarray(self.images[index]), border=4)
        left, top = random.randrange(9), random.randrange(9)
        crop = padded.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            crop = ImageOps.mirror(crop)
        image = torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous().float().div(255)  # ToTensor
        return image.sub_(MEAN).div_(STD), self.labels[index]


def loader(folder: Path, batch_size: int, reflect: bool = False) -> DataLoader[tuple[Tensor, int]]:
    """Return a loader of shuffled batches of the training set."""
    return DataLoader(Images(folder, reflect), batch_size, shuffle=True, drop_last=True)
