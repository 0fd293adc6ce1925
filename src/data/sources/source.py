"""The interface of a dataset to the DataModule."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class Images(Protocol):
    """The images of a split: a tensor, or an object that reads the images of a batch when they are fetched."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Tensor, /) -> Tensor:
        """Return the images of (n,) indices, (n, channels, height, width) uint8."""


class ImageSource(Protocol):
    """Source of the images of a dataset; each source is one file of `src/data/sources/`.

    `description` is a few words about the images. `classes` are the class names in the order of the labels, known after
    `load` at the latest; if they are empty, the numbers of the classes are their names.

    A source with its own validation images also has a method `has_val(root)`. If that returns true, `load` takes the
    split `val`, and no training images are held out.
    """

    description: str
    classes: Sequence[str]

    def prepare(self, root: Path) -> None:
        """Create the files under `root`, by download or generation. This runs in one process per node."""

    def load(self, root: Path, split: str) -> tuple[Images, Tensor]:
        """Return images, (n, channels, height, width) uint8, and labels, (n,) integers, of `train` or `test`."""


def read_all(images: Images) -> Tensor:
    """Return all images, (n, channels, height, width) uint8."""
    return images[torch.arange(len(images))]
