"""Images and labels in a NumPy file: `x_train`, `y_train`, `x_test`, `y_test` and perhaps `x_val`, `y_val`."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from src.utils.errors import UserError


class ArrayFile:
    """The arrays of an `.npz` file, in the names and the layout of Keras's datasets.

    Images are uint8 (n, height, width, channels), (n, channels, height, width) or, with one channel, (n, height,
    width). Labels are integers, (n,) or (n, 1).

    Args:
        file: path of the file.
        image_shape: (channels, height, width) of the images, which tells the layouts apart.
        classes: names of the classes in the order of the labels; None means their numbers.
    """

    description = "arrays in a file"

    def __init__(self, file: str, image_shape: Sequence[int], classes: Sequence[str] | None = None) -> None:
        self.file, self.image_shape, self.classes = Path(file), tuple(image_shape), classes or []

    def prepare(self, root: Path) -> None:
        """Check that the file has all arrays.

        Raises:
            UserError: if it is missing, is no `.npz` file, or lacks an array.
        """
        required = {"x_train", "y_train", "x_test", "y_test"}
        if missing := sorted(required - self._names()):
            raise UserError(f"data.source.file={self.file} has no array {missing[0]}: it needs {sorted(required)}")

    def has_val(self, root: Path) -> bool:
        return {"x_val", "y_val"} <= self._names()

    def load(self, root: Path, split: str) -> tuple[Tensor, Tensor]:
        """Return the split's images, (n, channels, height, width), and labels, (n,) int64.

        Raises:
            UserError: if the labels are no integers.
        """
        with np.load(self.file) as arrays:
            images, labels = torch.from_numpy(arrays[f"x_{split}"]), torch.from_numpy(arrays[f"y_{split}"])
        if labels.is_floating_point():
            raise UserError(f"data.source.file={self.file}: y_{split} has {labels.dtype} values: store integers")
        return self._channels_first(images), labels.flatten().long()

    def _channels_first(self, images: Tensor) -> Tensor:
        channels, height, width = self.image_shape
        shape = tuple(images.shape[1:])
        if shape == (height, width, channels) != self.image_shape:
            return images.permute(0, 3, 1, 2).contiguous()
        return images[:, None] if shape == (height, width) else images

    def _names(self) -> set[str]:
        try:
            with np.load(self.file) as arrays:
                return set(arrays)
        except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
            raise UserError(f"data.source.file={self.file} is no .npz file that can be read ({error})") from None
