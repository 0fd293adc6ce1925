"""The interface of a dataset to the DataModule."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor


class ImageSource(Protocol):
    """Source of the images of a dataset; each source is one file of `src/data/sources/`.

    `description` is a few words about the images. `classes` are the class names in the order of the labels.
    """

    description: str
    classes: Sequence[str]

    def prepare(self, root: Path) -> None:
        """Create the files under `root`, by download or generation. This runs in one process per node."""

    def load(self, root: Path, split: str) -> tuple[Tensor, Tensor]:
        """Return images, (n, channels, height, width) uint8, and labels, (n,) int64, of the split `train` or `test`."""
