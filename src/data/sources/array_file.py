"""Images and labels in a NumPy file: `x_train`, `y_train`, `x_test`, `y_test` and perhaps `x_val`, `y_val`."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onecurve import UserError

_REQUIRED = ("x_train", "y_train", "x_test", "y_test")


class ArrayFile:
    """Arrays in the names and the layout of Keras's datasets.

    Images are uint8 (n, height, width, channels), (n, channels, height, width) or, with one channel, (n, height,
    width). Labels are integers, (n,) or (n, 1).

    Args:
        file: an `.npz` file.
        image_shape: (channels, height, width) of the images, which tells the layouts apart.
        classes: names of the classes in the order of the labels; None means their numbers.
    """

    hardware_options = ("file",)  # they change no curve
    description = "arrays in a file"

    def __init__(self, file: str, image_shape: Sequence[int], classes: Sequence[str] | None = None) -> None:
        self.file, self.image_shape, self.classes = Path(file), tuple(image_shape), classes or []

    def prepare(self, root: Path) -> None:
        """Check that there are all arrays."""
        if missing := [name for name in _REQUIRED if name not in self._names()]:
            raise UserError(f"data.source.file={self.file} has no array {missing[0]}: it needs {', '.join(_REQUIRED)}")

    def has_val(self, root: Path) -> bool:
        return {"x_val", "y_val"} <= self._names()

    def load(self, root: Path, split: str) -> tuple[Tensor, Tensor]:
        """Return the split's images, (n, channels, height, width), and its labels, (n,) integers."""
        try:
            with np.load(self.file) as arrays:
                images = _channels_first(torch.from_numpy(arrays[f"x_{split}"]), self.image_shape)
                labels = torch.from_numpy(arrays[f"y_{split}"])
        except (TypeError, ValueError) as error:  # objects, or strings
            raise UserError(
                f"data.source.file={self.file}: an array of `{split}` has no numbers ({error}): store integers"
            ) from error
        return images, labels.squeeze(1) if labels.shape[1:] == (1,) else labels

    def _names(self) -> set[str]:
        try:
            with np.load(self.file) as arrays:
                return set(arrays)
        except (EOFError, OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
            raise UserError(f"data.source.file={self.file} is no .npz file that can be read ({error})") from None


def _channels_first(images: Tensor, image_shape: tuple[int, ...]) -> Tensor:
    channels, height, width = image_shape
    shape = tuple(images.shape[1:])
    if shape == (height, width, channels) != image_shape:
        return images.permute(0, 3, 1, 2).contiguous()
    return images[:, None] if shape == (height, width) else images
