"""A dataset of the image files in a folder, for prediction."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from src.data.batch import Batch
from src.utils.errors import UserError


class ImageFolder(Dataset[Batch]):
    """The image files of a folder and its subfolders, in the order of their paths; an item is a batch.

    Each image is cropped to a square around its center and resized to the size that the network was trained on. It is
    read when its batch is fetched.

    Raises:
        UserError: if the folder contains no image, or an image cannot be read.
    """

    def __init__(self, folder: Path, image_shape: tuple[int, int, int]) -> None:
        Image.init()  # registers all formats, which Pillow does not do at import
        readable = {suffix for suffix, kind in Image.EXTENSION.items() if kind in Image.OPEN}
        self.folder, (_, self.height, self.width) = folder, image_shape
        self.files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in readable)
        if not self.files:
            raise UserError(
                f"predict={folder}: there is no image in it (.png, .jpg, or another format that Pillow reads)"
            )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, positions: Tensor) -> Batch:
        blank = torch.zeros(3, self.height, self.width, dtype=torch.uint8)
        images = torch.stack([self._read(self.files[i]) if i >= 0 else blank for i in positions.tolist()])
        return Batch(images, torch.zeros_like(positions), positions, weight=positions >= 0)

    def _read(self, file: Path) -> Tensor:
        try:
            with Image.open(file) as image:
                upright = ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:  # a corrupt file can raise anything
            raise UserError(
                f"predict={self.folder}: {file} cannot be read ({error}): repair it or move it away"
            ) from None
        side = min(upright.size)
        left, top = ((length - side) // 2 for length in upright.size)
        box = (left, top, left + side, top + side)
        pixels = np.array(upright.resize((self.width, self.height), Image.Resampling.BICUBIC, box=box))
        return torch.from_numpy(pixels).permute(2, 0, 1)
