"""Crops, flips, cut-outs and normalisation of a whole batch on its device; random numbers are a hash of the sample."""

import functools

import torch
from torch import Tensor

from src.data.hashing import hash_ints, integers, uniform


def sample_keys(seed: int, epoch: int, index: Tensor) -> Tensor:
    """The key of each sample's random numbers in one epoch."""
    return hash_ints(seed, epoch, index, device=index.device)


def crop_and_flip(image: Tensor, keys: Tensor, padding: int, flip: bool | Tensor) -> Tensor:
    """Crop each (channels, height, width) image at random from itself padded by reflection; mirror every second.

    Which ones are mirrored, (n,) bool, can be given in the place of `flip`.

    One gather does both. Padding and flipping as in He et al., "Deep residual learning" (2015), section 4.2,
    but with reflected borders instead of black ones.
    """
    count, channels, height, width = image.shape
    top, left, mirrored = random_crop(keys, padding, flip)
    rows = windows(height, padding, image.device).index_select(0, top)
    columns = windows(width, padding, image.device).index_select(0, left)
    columns = torch.where(mirrored[:, None], width - 1 - columns, columns)
    source = (rows * width)[:, :, None] + columns[:, None, :]
    pixels = source.view(count, 1, -1).expand(-1, channels, -1)
    return image.flatten(2).gather(2, pixels).view_as(image)


def random_crop(keys: Tensor, padding: int, flip: bool | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each key: the crop's first row and column in the image with its borders, and whether it is mirrored."""
    draws = torch.arange(2, device=keys.device).view(2, *[1] * keys.ndim)
    top, left = integers(keys, draws, 2 * padding + 1)
    if flip is True:
        flip = random_flip(keys)
    return top, left, flip if isinstance(flip, Tensor) else torch.zeros_like(keys, dtype=torch.bool)


def random_flip(keys: Tensor) -> Tensor:
    """Which images to mirror: every second, at random."""
    return uniform(keys, 2) < 0.5


def alternating_flip(seed: int, epoch: int, index: Tensor) -> Tensor:
    """Those mirrored at random in epoch zero, in the next epoch the others, and so on in turn.

    A pair of epochs shows every image both ways (Jordan, "94% on CIFAR-10 in 3.29 seconds", 2024, section 3.6).
    """
    return random_flip(sample_keys(seed, 0, index)) ^ bool(epoch % 2)


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
    layout = torch.contiguous_format if image.is_contiguous() else torch.channels_last
    shape = image.shape[1:]
    shift, scale = (_per_pixel(tuple(values), shape, dtype, image.device, layout) for values in (mean, std))
    return image.to(dtype).sub_(shift).div_(scale)


@functools.cache
def _per_pixel(
    values: tuple[float, ...], shape: torch.Size, dtype: torch.dtype, device: torch.device, layout: torch.memory_format
) -> Tensor:
    """Laid out as the images, and kept on the device: sending them with each batch would make it wait."""
    of_channels = torch.tensor(values, dtype=dtype, device=device)[:, None, None] * 255
    return of_channels.expand(1, *shape).contiguous(memory_format=layout)


@functools.cache
def windows(size: int, padding: int, device: torch.device) -> Tensor:
    """The places that each crop of a line of `size` pixels takes, (2 padding + 1, size), from the outermost on."""
    shifts, places = torch.arange(-padding, padding + 1, device=device), torch.arange(size, device=device)
    reflected = (shifts[:, None] + places).abs()
    return torch.where(reflected >= size, 2 * (size - 1) - reflected, reflected)
