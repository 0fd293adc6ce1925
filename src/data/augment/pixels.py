"""Crop, flip, cutout and normalization of a batch on its device; random numbers are hashes of the sample."""

import functools

import torch
from torch import Tensor

from onecurve import device_constant, hash_ints, integers, uniform


def sample_keys(seed: int, epoch: int, index: Tensor) -> Tensor:
    """Return the key of each sample's random numbers in one epoch, in the shape of `index`."""
    return hash_ints(seed, epoch, index, device=index.device)


@functools.lru_cache(maxsize=4)
def all_sample_keys(seed: int, epoch: int, count: int, device: torch.device) -> Tensor:
    """Return the (count,) keys of all samples of a dataset, cached: a step then takes one operation to look them up."""
    return sample_keys(seed, epoch, torch.arange(count, device=device))


@functools.lru_cache(maxsize=2)
def all_alternating_flips(seed: int, epoch: int, count: int, device: torch.device) -> Tensor:
    """Return the (count,) bool of `alternating_flip` for all samples of a dataset, cached like their keys."""
    return alternating_flip(all_sample_keys(seed, 0, count, device), epoch)


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
    crops = 2 * padding + 1
    top, left, is_kept = integers(keys, (0, 1, 2), (crops, crops, 2))
    rows = _source_positions(height, padding, image.device).index_select(0, top)
    columns = _source_positions(width, padding, image.device)
    if flip is not False:
        columns = _with_mirrored(width, padding, image.device)
        mirrored = flip if isinstance(flip, Tensor) else is_kept == 0  # the same images as in `alternating_flip`
        left = torch.add(left, mirrored, alpha=crops)
    source = torch.add(columns.index_select(0, left)[:, None, :], rows[:, :, None], alpha=width)
    source = source.view(count, 1, -1).expand(-1, channels, -1)  # indices into a flat image
    return image.flatten(2).gather(2, source).view_as(image)


def alternating_flip(first_keys: Tensor, epoch: int) -> Tensor:
    """Return which images to mirror: a random half in even epochs, the other half in odd epochs.

    `first_keys` are the images' keys of epoch 0. Two consecutive epochs show every image both ways (Jordan, "94% on
    CIFAR-10 in 3.29 seconds", 2024, section 3.6).
    """
    return (uniform(first_keys, 2) < 0.5) ^ bool(epoch % 2)


def cutout(image: Tensor, keys: Tensor, size: int) -> Tensor:
    """Set a square of side `size` around a random center of each image to zero (DeVries and Taylor, 2017).

    Images are (n, channels, height, width), keys (n,).
    """
    height, width = image.shape[-2:]
    top, left = integers(keys, (3, 4), (height, width))[..., None] - size // 2
    rows = torch.arange(height, device=image.device) - top  # (n, height), counted from the square's first row
    columns = torch.arange(width, device=image.device) - left
    in_rows, in_columns = (rows >= 0) & (rows < size), (columns >= 0) & (columns < size)
    return image.masked_fill((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0.0)


def normalize(image: Tensor, mean: list[float], std: list[float], dtype: torch.dtype) -> Tensor:
    """Turn (n, channels, height, width) uint8 pixels into floats of mean 0 and standard deviation 1.

    `mean` and `std` are per channel, in [0, 1].
    """
    shape = image.shape[1:]
    shift, scale = (_per_pixel(tuple(values), shape, dtype, image.device) for values in (mean, std))
    return (image - shift).div_(scale)


@device_constant
def _per_pixel(values: tuple[float, ...], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values of the channels, scaled to pixels, as (channels, height, width).

    They are cached on the device: a transfer with each batch would need a host-device synchronization.
    """
    per_channel = torch.tensor(values, dtype=dtype, device=device)[:, None, None] * 255
    return per_channel.expand(shape).contiguous()


@device_constant
def _source_positions(size: int, padding: int, device: torch.device) -> Tensor:
    """Return the source positions of every possible crop of a padded line of `size` pixels.

    The shape is (2 padding + 1, size): row i is the crop that begins i - padding pixels from the line's first pixel.
    Positions in the padding are reflected into the line.
    """
    shifts = torch.arange(-padding, padding + 1, device=device)[:, None]
    positions = (shifts + torch.arange(size, device=device)).abs()  # reflects the positions before the first pixel
    return torch.where(positions >= size, 2 * (size - 1) - positions, positions)


@device_constant
def _with_mirrored(size: int, padding: int, device: torch.device) -> Tensor:
    """Return `_source_positions`, followed by those of the mirrored line."""
    positions = _source_positions(size, padding, device)
    return torch.cat([positions, size - 1 - positions])
