"""TrivialAugment for a batch on its device: one random operation per image, at a random strength.

Müller and Hutter, "TrivialAugment: tuning-free yet state-of-the-art data augmentation" (2021), the wide search space:
14 operations at 31 strengths. Every operation is computed for every image, and each image keeps one result: to select
the images of an operation would need a host-device synchronization.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from src.data.hashing import integers, uniform

OPERATIONS = (
    *("identity", "shear x", "shear y", "translate x", "translate y", "rotate", "brightness", "color", "contrast"),
    *("sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
_LEVELS = 31


def trivial_augment(image: Tensor, keys: Tensor) -> Tensor:
    """Apply one random operation to each of (n, 3, height, width) uint8 images; `keys` are (n,)."""
    operation = integers(keys, 5, len(OPERATIONS))
    level = integers(keys, 6, _LEVELS) / (_LEVELS - 1)
    signed_level = torch.where(uniform(keys, 7) < 0.5, -level, level)
    return apply_operations(image, operation, level, signed_level)


def apply_operations(image: Tensor, operation: Tensor, level: Tensor, signed_level: Tensor) -> Tensor:
    """Apply to each image its operation.

    Args:
        image: (n, 3, height, width) uint8.
        operation: (n,) indices into `OPERATIONS`.
        level: (n,) strengths in [0, 1].
        signed_level: (n,) strengths in [-1, 1], for operations that have a direction.
    """
    matrix, offset = _affine_maps(operation, signed_level, image.shape[-2:])
    pixels = _warp(image, matrix, offset).float()
    result = pixels  # of an operation that only moves pixels
    operation, level, signed_level = (values.view(-1, 1, 1, 1) for values in (operation, level, signed_level))
    for name, recolored in _recolored(pixels, level, signed_level):
        result = torch.where(operation == OPERATIONS.index(name), recolored, result)
    return result.clamp(0, 255).to(torch.uint8)


def _affine_maps(operation: Tensor, signed_level: Tensor, size: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the (n, 2, 2) matrices and (n, 2) offsets that map an output pixel (row, column) to its source.

    An image with a color operation gets the identity.
    """
    angle = _only_for("rotate", operation, signed_level * math.radians(135))
    shear_x = _only_for("shear x", operation, 0.99 * signed_level)
    shear_y = _only_for("shear y", operation, 0.99 * signed_level)
    source_row = torch.stack([angle.cos(), shear_y - angle.sin()], -1)
    source_column = torch.stack([shear_x + angle.sin(), angle.cos()], -1)
    matrix = torch.stack([source_row, source_column], -2)
    pixels = (32 * signed_level).trunc()
    shift = [_only_for("translate y", operation, pixels), _only_for("translate x", operation, pixels)]
    # A rotation keeps the image's center, the other operations keep pixel (0, 0).
    center = [_only_for("rotate", operation, torch.full_like(signed_level, (side - 1) / 2)) for side in size]
    fixed = torch.stack(center, -1)
    return matrix, fixed - (matrix @ fixed[:, :, None]).squeeze(-1) + torch.stack(shift, -1)


def _only_for(name: str, operation: Tensor, value: Tensor) -> Tensor:
    """Return the value of each image whose operation is `name`, and 0 for the others."""
    return torch.where(operation == OPERATIONS.index(name), value, 0.0)


def _warp(image: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """Take each output pixel from the pixel nearest to its source; pixels from outside the image are black."""
    count, channels, height, width = image.shape
    rows = torch.arange(height, dtype=torch.float32, device=image.device)[:, None]
    columns = torch.arange(width, dtype=torch.float32, device=image.device)
    matrix, offset = matrix[..., None, None], offset[..., None, None]  # to broadcast with the pixels
    position = matrix[:, :, 0] * rows + matrix[:, :, 1] * columns + offset  # (n, 2, height, width)
    row, column = position.round().long().unbind(1)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    source = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).view(count, 1, -1)
    warped = image.flatten(2).gather(2, source.expand(-1, channels, -1)).view_as(image)
    return torch.where(inside[:, None], warped, 0)


def _recolored(pixels: Tensor, level: Tensor, signed_level: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the result of each color operation on all images.

    Args:
        pixels: (n, 3, height, width) floats in [0, 255].
        level: (n, 1, 1, 1) strengths in [0, 1].
        signed_level: (n, 1, 1, 1) strengths in [-1, 1].
    """
    factor = 1 + 0.99 * signed_level
    red, green, blue = pixels.split(1, dim=1)
    gray = (0.299 * red + 0.587 * green + 0.114 * blue).round()
    yield "brightness", factor * pixels
    yield "color", torch.lerp(gray.expand_as(pixels), pixels, factor)
    yield "contrast", torch.lerp(gray.mean((1, 2, 3), keepdim=True).round().expand_as(pixels), pixels, factor)
    yield "sharpness", torch.lerp(_smooth(pixels), pixels, factor)
    step = torch.exp2((6 * level).round())
    yield "posterize", (pixels / step).floor() * step
    yield "solarize", torch.where(pixels >= 255 * (1 - level), 255 - pixels, pixels)
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    yield "autocontrast", torch.where(high > low, (pixels - low) * 255 / (high - low).clamp_min(1), pixels)
    yield "equalize", _equalize(pixels)


def _smooth(pixels: Tensor) -> Tensor:
    """Blur (n, 3, height, width) pixels slightly with a 3 x 3 kernel; the border stays as it is."""
    rows = pixels[:, :, :-2] + pixels[:, :, 1:-1] + pixels[:, :, 2:]
    around = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    smooth = pixels.clone()
    smooth[:, :, 1:-1, 1:-1] = ((around + 4 * pixels[:, :, 1:-1, 1:-1]) / 13).round()
    return smooth


def _equalize(pixels: Tensor) -> Tensor:
    """Equalize the histogram of each channel: all values then occur equally often, as far as integers allow."""
    flat = pixels.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=pixels.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    below = counts.cumsum(2) - counts
    table = (below + step // 2) // step.clamp_min(1)
    return torch.where(step > 0, table.gather(2, flat), flat).clamp(0, 255).view_as(pixels).float()
