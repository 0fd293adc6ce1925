"""Crop, flip, cutout and normalization of a whole batch on its device; random numbers are hashes of the sample."""

import functools

import torch
from torch import Tensor

from src.data.hashing import hash_ints, integers, uniform


def sample_keys(seed: int, epoch: int, index: Tensor) -> Tensor:
    """Return the key of each sample's random numbers in one epoch, in the shape of `index`."""
    return hash_ints(seed, epoch, index, device=index.device)


def crop_and_flip(image: Tensor, keys: Tensor, padding: int, flip: bool | Tensor) -> Tensor:
    """Crop each image at random from its copy padded by reflection, and mirror a random half of the images.

    One gather does both. He et al., "Deep residual learning" (2015), section 4.2, pad and flip in the same way, but
    with black borders instead of reflected ones.

    Args:
        image: (n, channels, height, width).
        keys: (n,) keys of the samples' random numbers.
        padding: width of the border in pixels; 0 for no crop.
        flip: whether to mirror a random half of the images, or (n,) bool that selects the mirrored ones.
    """
    count, channels, height, width = image.shape
    draws = torch.arange(2, device=keys.device)[:, None]
    top, left = integers(keys, draws, 2 * padding + 1)
    rows = _windows(height, padding, image.device).index_select(0, top)
    columns = _windows(width, padding, image.device).index_select(0, left)
    if flip is not False:
        mirrored = flip if isinstance(flip, Tensor) else random_flip(keys)
        columns = torch.where(mirrored[:, None], width - 1 - columns, columns)
    source = (rows * width)[:, :, None] + columns[:, None, :]
    pixels = source.view(count, 1, -1).expand(-1, channels, -1)
    return image.flatten(2).gather(2, pixels).view_as(image)


def random_flip(keys: Tensor) -> Tensor:
    """Return which images to mirror, each with probability 1/2, in the shape of `keys`."""
    return uniform(keys, 2) < 0.5


def alternating_flip(seed: int, epoch: int, index: Tensor) -> Tensor:
    """Return which images to mirror: a random half in even epochs, the other half in odd epochs.

    Two consecutive epochs show every image both ways (Jordan, "94% on CIFAR-10 in 3.29 seconds", 2024, section 3.6).
    """
    return random_flip(sample_keys(seed, 0, index)) ^ bool(epoch % 2)


def cutout(image: Tensor, keys: Tensor, size: int) -> Tensor:
    """Set a square of side `size` around a random center of each image to zero (DeVries and Taylor, 2017).

    Images are (n, channels, height, width), keys (n,).
    """
    height, width = image.shape[-2:]
    centre_row, centre_column = integers(keys, 3, height)[:, None], integers(keys, 4, width)[:, None]
    rows = torch.arange(height, device=image.device) - centre_row + size // 2
    columns = torch.arange(width, device=image.device) - centre_column + size // 2
    inside = ((rows >= 0) & (rows < size))[:, :, None] & ((columns >= 0) & (columns < size))[:, None, :]
    return image.masked_fill(inside[:, None], 0.0)


def normalize(image: Tensor, mean: list[float], std: list[float], dtype: torch.dtype) -> Tensor:
    """Turn (n, channels, height, width) uint8 pixels into floats of mean 0 and standard deviation 1.

    `mean` and `std` are per channel, in [0, 1].
    """
    shape = image.shape[1:]
    shift, scale = (_per_pixel(tuple(values), shape, dtype, image.device) for values in (mean, std))
    return image.to(dtype).sub_(shift).div_(scale)


@functools.cache
def _per_pixel(values: tuple[float, ...], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values of the channels, scaled to pixels, as (channels, height, width).

    They are cached on the device: sending them with each batch would cost a host-device synchronization.
    """
    per_channel = torch.tensor(values, dtype=dtype, device=device)[:, None, None] * 255
    return per_channel.expand(shape).contiguous()


@functools.cache
def _windows(size: int, padding: int, device: torch.device) -> Tensor:
    """Return the source positions of every possible crop of a padded line of `size` pixels.

    They are (2 padding + 1, size): row i is the crop that begins i - padding pixels from the line's first pixel.
    Positions in the padding are reflected into the line.
    """
    shifts, places = torch.arange(-padding, padding + 1, device=device), torch.arange(size, device=device)
    reflected = (shifts[:, None] + places).abs()
    return torch.where(reflected >= size, 2 * (size - 1) - reflected, reflected)
