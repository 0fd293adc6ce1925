"""Loader and augmentation without a network, for `engine.dev.bench`.

`--path ours` is this template's DataModule. `--path pil` is the data path of tutorials: image by image through PIL, and
the default collate. It is equivalent to torchvision's RandomCrop(32, padding=4), RandomHorizontalFlip, ToTensor and
Normalize in a map-style dataset under `DataLoader(shuffle=True)`, in the main process and without torchvision's checks.
Images are in memory, as in torchvision's CIFAR10, so nothing is decoded.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from engine.dev.peers.common import MEAN, STD, Marks, arguments
from onecurve import build, compose
from onecurve.process.devices import tune_malloc
from src.data.sources.cifar import CIFAR10

_MEAN, _STD = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)


class PILImages(Dataset[tuple[Tensor, int]]):
    """CIFAR-10's training set as (height, width, channels) arrays; an item is an augmented image and its label."""

    def __init__(self, folder: Path) -> None:
        images, labels = CIFAR10([]).load(folder, "train")
        self.images, self.labels = images.permute(0, 2, 3, 1).contiguous().numpy(), labels.tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        padded = ImageOps.expand(Image.fromarray(self.images[index]), border=4)
        left, top = random.randrange(9), random.randrange(9)
        crop = padded.crop((left, top, left + 32, top + 32))
        if random.random() < 0.5:
            crop = ImageOps.mirror(crop)
        image = torch.from_numpy(np.array(crop)).permute(2, 0, 1).contiguous().float().div(255)  # ToTensor
        return image.sub_(_MEAN).div_(_STD), self.labels[index]


def pil_batches(folder: Path, batch: int) -> Iterator[Any]:
    """Yield shuffled batches of the training set."""
    return iter(DataLoader(PILImages(folder), batch, shuffle=True, drop_last=True))


def our_batches(folder: Path, batch: int) -> Iterator[Any]:
    """Yield the augmented batches of this template's DataModule."""
    data = build(compose(f"data.root={folder}", f"data.batch_size={batch}").data)
    data.setup("fit")
    return map(data.augment_batch, data.train_dataloader())


PATHS = {"ours": our_batches, "pil": pil_batches}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--path", choices=PATHS, default="ours")
    options = parser.parse_args()
    tune_malloc()
    marks = Marks(options.clock, options.log_every)
    for step, _ in enumerate(PATHS[options.path](options.data, options.batch), start=1):
        marks.step(step)
        if step == options.steps:
            break


if __name__ == "__main__":
    main()
