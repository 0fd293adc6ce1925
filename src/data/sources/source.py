"""What a data set is to the DataModule."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor


class ImageSource(Protocol):
    """Where images come from: one file of `src/data/` each, which says in a few words what they are.

    `classes` are the names of its classes, in the order of the labels.
    """

    description: str
    classes: Sequence[str]

    def prepare(self, root: Path) -> None:
        """Make the files under `root`: download, unpack, draw. Runs in one process per node."""

    def load(self, root: Path, split: str) -> tuple[Tensor, Tensor]:
        """Images, (n, channels, height, width) uint8, and labels, (n,) int64, of the split `train` or `test`."""
