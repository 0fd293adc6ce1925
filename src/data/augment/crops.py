"""Images stored so that a random crop, mirrored or not, consists of contiguous lines, which one copy fetches."""

from collections.abc import Iterator

import torch
from torch import Tensor

from src.data.augment.pixels import random_crop, windows

_BLOCK = 1000  # images copied at a time, so that only a few are in memory twice


class Bordered:
    """(n, channels, height, width) uint8 images with reflected borders left and right, and their mirror images.

    They take 2 (width + 2 padding) / width times the memory of the images. Crops have the channels-last memory format.
    """

    def __init__(self, images: Tensor, padding: int) -> None:
        self.padding, (count, channels, self.height, self.width) = padding, images.shape
        self.lines = images.new_empty(count, 2, self.height, self.width + 2 * padding, channels)
        for part, place in zip(images.split(_BLOCK), self.lines.split(_BLOCK), strict=True):
            pixels = torch.stack(part.unbind(1), -1)
            left, right = pixels[:, :, 1 : padding + 1].flip(2), pixels[:, :, -padding - 1 : -1].flip(2)
            wide = torch.cat([left, pixels, right], 2)
            torch.stack([wide, wide.flip(2)], 1, out=place)

    def gather(self, index: Tensor) -> Tensor:
        """Return the images of (n,) indices without borders. `images.index_select` would take 4 to 16 times as long."""
        lines = self.lines.flatten(0, 1).index_select(0, 2 * index)
        return lines[:, :, self.padding : self.padding + self.width].permute(0, 3, 1, 2)

    @property
    def images(self) -> Tensor:
        """Return a view of the (n, channels, height, width) images without borders."""
        return self.lines[:, 0, :, self.padding : self.padding + self.width].permute(0, 3, 1, 2)

    def crops(self, index: Tensor, keys: Tensor, flip: bool | Tensor) -> Iterator[Tensor]:
        """Yield for each batch of the (batches, n) indices and keys the same images as `crop_and_flip`.

        All random numbers are computed at once: for the few numbers of one batch, most of the time is call overhead.
        """
        bytes_of_line, channels = self.lines[0, 0, 0].numel(), self.lines.shape[-1]
        top, left, mirrored = random_crop(keys, self.padding, flip)
        begin = (2 * index + mirrored) * (self.height * bytes_of_line) + left * channels
        lines = windows(self.height, self.padding, index.device) * bytes_of_line
        flat, size = self.lines.view(-1), self.width * channels
        # An overlapping view: row i consists of the bytes from i on that form one line of a crop.
        cuts = flat.as_strided((len(flat) - size + 1, size), (1, 1))
        for first, rows in zip(begin, top, strict=True):
            places = lines.index_select(0, rows) + first[:, None]
            pixels = cuts.index_select(0, places.flatten())
            yield pixels.view(-1, self.height, self.width, channels).permute(0, 3, 1, 2)
