"""Images kept so that a random crop, mirrored or not, is made of whole lines, fetched all at once by one copy."""

from collections.abc import Iterator

import torch
from torch import Tensor

from src.data.augment.pixels import random_crop, windows

_BLOCK = 1000  # images at a time, so that few are in memory twice


class Bordered:
    """Each of (n, channels, height, width) uint8 images with reflected borders left and right, and its mirror image.

    Takes 2 (width + 2 padding) / width times the images' memory. Crops are laid out channels last.
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
        """Those of (n,) indices, as they are: `images.index_select` would take 4 to 16 times as long."""
        lines = self.lines.flatten(0, 1).index_select(0, 2 * index)
        return lines[:, :, self.padding : self.padding + self.width].permute(0, 3, 1, 2)

    @property
    def images(self) -> Tensor:
        """The images themselves: a view."""
        return self.lines[:, 0, :, self.padding : self.padding + self.width].permute(0, 3, 1, 2)

    def crops(self, index: Tensor, keys: Tensor, flip: bool | Tensor) -> Iterator[Tensor]:
        """Batch after batch, what `crop_and_flip` would make of the images of (batches, n) indices and their keys.

        The random numbers of all are made at once, since with few numbers it is the call that costs.
        """
        bytes_of_line, channels = self.lines[0, 0, 0].numel(), self.lines.shape[-1]
        top, left, mirrored = random_crop(keys, self.padding, flip)
        begin = (2 * index + mirrored) * (self.height * bytes_of_line) + left * channels
        lines = windows(self.height, self.padding, index.device) * bytes_of_line
        flat, size = self.lines.view(-1), self.width * channels
        cuts = flat.as_strided((len(flat) - size + 1, size), (1, 1))  # as much as a line of a crop, from each byte on
        for first, rows in zip(begin, top, strict=True):
            places = lines.index_select(0, rows) + first[:, None]
            pixels = cuts.index_select(0, places.flatten())
            yield pixels.view(-1, self.height, self.width, channels).permute(0, 3, 1, 2)
