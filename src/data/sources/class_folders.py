"""Images in one folder per class: `train/CLASS/*.png`, `test/CLASS/*.png` and perhaps `val/CLASS/*.png`."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from onecurve import UserError
from src.data.image_files import ImageFiles, find_images
from src.data.sources.source import Images, read_all


class ClassFolders:
    """The images below `root`; the folders of `root/train`, in alphabetical order, are the classes.

    Args:
        image_shape: (channels, height, width), to which the images are cropped and resized.
        in_memory: whether to read all images at the start, or those of a batch when it is fetched.
    """

    hardware_options = ("in_memory",)  # they change no curve
    description = "images in folders"

    def __init__(self, image_shape: Sequence[int], in_memory: bool = True) -> None:
        self.image_shape, self.in_memory = image_shape, in_memory
        self.classes: list[str] = []

    def prepare(self, root: Path) -> None:
        """Check that there are folders for training and test."""
        for split in ("train", "test"):
            if not (root / split).is_dir():
                raise UserError(f"data.root={root}: there is no folder `{split}` in it, with a folder for each class")

    def has_val(self, root: Path) -> bool:
        return (root / "val").is_dir()

    def load(self, root: Path, split: str) -> tuple[Images, Tensor]:
        """Return the split's images, (n, channels, height, width) uint8, and labels, (n,) int64."""
        self.classes = _folders(root / "train")
        if unknown := set(_folders(root / split)) - set(self.classes):
            raise UserError(f"data.root={root}: `{split}` has the class {min(unknown)}, which is not in `train`")
        files = [find_images(root / split / name) for name in self.classes]
        if not any(files):
            raise UserError(f"data.root={root}: there is no image in the folders of `{split}`")
        labels = torch.arange(len(files)).repeat_interleave(torch.tensor([len(names) for names in files]))
        images = ImageFiles([file for names in files for file in names], self.image_shape, f"data.root={root}")
        return read_all(images) if self.in_memory else images, labels


def _folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
