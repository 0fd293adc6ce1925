"""Crops, flips, cut-outs and normalisation of a whole batch on its device; random numbers are a hash of the sample."""

import functools

import torch
from torch import Tensor

from src.data.hashing import hash_ints, integers, uniform


def sample_keys(seed: int, epoch: int, index: Tensor) -> Tensor:
    """The key of each sample's random numbers in one epoch."""
    return hash_ints(seed, epoch, index, device=index.device)


def crop_and_flip(image: Tensor, keys: Tensor, padding: int, flip: bool) -> Tensor:
    """Crop each (channels, height, width) image at random from itself padded by reflection; mirror every second.

    One gather does both. Padding and flipping as in He et al., "Deep residual learning" (2015), section 4.2,
    but with reflected borders instead of black ones.
    """
    count, channels, height, width = image.shape
    rows = torch.arange(height, device=image.device) + integers(keys, 0, 2 * padding + 1)[:, None] - padding
    columns = torch.arange(width, device=image.device) + integers(keys, 1, 2 * padding + 1)[:, None] - padding
    if flip:
        mirrored = (uniform(keys, 2) < 0.5)[:, None]
        columns = torch.where(mirrored, width - 1 - columns, columns)
    source = _reflect(rows, height)[:, :, None] * width + _reflect(columns, width)[:, None, :]
    pixels = source.view(count, 1, -1).expand(-1, channels, -1)
    return image.flatten(2).gather(2, pixels).view_as(image)


def cutout(image: Tensor, keys: Tensor, size: int) -> Tensor:
    """Set a square of `size` pixels around a random centre to zero (DeVries and Taylor, 2017)."""
    height, width = image.shape[-2:]
    centre_row, centre_column = integers(keys, 3, height)[:, None], integers(keys, 4, width)[:, None]
    rows = torch.arange(height, device=image.device) - centre_row + size // 2
    columns = torch.arange(width, device=image.device) - centre_column + size // 2
    inside = ((rows >= 0) & (rows < size))[:, :, None] & ((columns >= 0) & (columns < size))[:, None, :]
    return image.masked_fill(inside[:, None], 0.0)


def normalize(image: Tensor, mean: list[float], std: list[float], dtype: torch.dtype) -> Tensor:
    """Turn uint8 pixels into floats of mean 0 and standard deviation 1; `mean` and `std` are per channel, in [0, 1]."""
    shift, scale = (_per_channel(tuple(values), dtype, image.device) for values in (mean, std))
    return (image.to(dtype) - shift) / scale


@functools.cache
def _per_channel(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Kept on the device: sending them with each batch would make it wait."""
    return torch.tensor(values, dtype=dtype, device=device)[:, None, None] * 255


def _reflect(position: Tensor, size: int) -> Tensor:
    position = position.abs()
    return torch.where(position >= size, 2 * (size - 1) - position, position)
