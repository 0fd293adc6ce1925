"""Images in files: found in folders, and read, cropped and resized when they are fetched."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from onecurve import UserError

_MODES = {1: "L", 3: "RGB"}  # Pillow's, by the number of channels


class ImageFiles:
    """Images that are read when they are fetched: `images[index]` are (n, channels, height, width) uint8.

    Args:
        files: the files in the order of the images.
        image_shape: (channels, height, width) of the images.
        option: the option that names the files, for error messages.
    """

    def __init__(self, files: Sequence[Path], image_shape: Sequence[int], option: str) -> None:
        self.files, self.image_shape, self.option = files, image_shape, option

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Tensor) -> Tensor:
        return torch.stack([self._read(self.files[number]) for number in index.tolist()])

    def _read(self, file: Path) -> Tensor:
        try:
            with Image.open(file) as image:
                return to_tensor(image, self.image_shape)
        except UserError:
            raise
        except Exception as error:  # a corrupt file can raise anything
            raise UserError(f"{self.option}: {file} cannot be read ({error}): repair it or move it away") from None


def to_tensor(image: Image.Image, image_shape: Sequence[int]) -> Tensor:
    """Crop an image around its center to the proportions of `image_shape`, resize it, and return it as uint8."""
    channels, height, width = image_shape
    if channels not in _MODES:
        raise UserError(f"data.image_shape={list(image_shape)}: images have 1 channel (gray) or 3 (colors)")
    upright = ImageOps.exif_transpose(image).convert(_MODES[channels])
    pixels = np.array(ImageOps.fit(upright, (width, height), Image.Resampling.BICUBIC))
    return torch.from_numpy(pixels).view(height, width, channels).permute(2, 0, 1)


def find_images(folder: Path) -> list[Path]:
    """Return the image files of a folder and its subfolders, in the order of their paths."""
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in _readable_suffixes())


@functools.cache
def _readable_suffixes() -> set[str]:
    Image.init()  # registers all formats, which Pillow does not do at import
    return {suffix for suffix, kind in Image.EXTENSION.items() if kind in Image.OPEN}
