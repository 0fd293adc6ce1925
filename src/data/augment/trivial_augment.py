"""TrivialAugment for a whole batch on its device: one random operation per image, at a random strength.

Müller and Hutter, "TrivialAugment: tuning-free yet state-of-the-art data augmentation" (2021), the wide search space:
14 operations at 31 strengths. Every operation is computed for every image, and the chosen one is kept: selecting the
images of an operation would need a host-device synchronization.
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
    drawn = integers(keys, 5, len(OPERATIONS))
    level = integers(keys, 6, _LEVELS) / (_LEVELS - 1)
    signed = torch.where(uniform(keys, 7) < 0.5, -level, level)
    return apply(image, drawn, level, signed)


def apply(image: Tensor, operation: Tensor, level: Tensor, signed: Tensor) -> Tensor:
    """Apply its operation to each image.

    Args:
        image: (n, 3, height, width) uint8.
        operation: (n,) indices into `OPERATIONS`.
        level: (n,) strengths in [0, 1].
        signed: (n,) the strengths with a sign, for operations that have a direction.
    """
    moved = _move(image, *_affine(operation, signed, image.shape[-2:]))
    result = moved.float()
    for name, changed in _recolored(moved.float(), *(part.view(-1, 1, 1, 1) for part in (level, signed))):
        chosen = (operation == OPERATIONS.index(name)).view(-1, 1, 1, 1)
        result = torch.where(chosen, changed, result)
    return result.clamp(0, 255).to(torch.uint8)


def _affine(operation: Tensor, signed: Tensor, size: torch.Size) -> tuple[Tensor, Tensor]:
    """Return the (n, 2, 2) matrices and (n, 2) offsets that map an output pixel (row, column) to its source."""

    def where(name: str, value: Tensor) -> Tensor:
        return torch.where(operation == OPERATIONS.index(name), value, 0.0)

    angle = where("rotate", signed * math.radians(135))
    shear_x, shear_y = where("shear x", 0.99 * signed), where("shear y", 0.99 * signed)
    rows = torch.stack([angle.cos(), shear_y - angle.sin()], -1)
    columns = torch.stack([shear_x + angle.sin(), angle.cos()], -1)
    matrix = torch.stack([rows, columns], -2)
    center = torch.stack([where("rotate", torch.full_like(signed, (side - 1) / 2)) for side in size], -1)
    moved = torch.stack([where("translate y", (32 * signed).trunc()), where("translate x", (32 * signed).trunc())], -1)
    return matrix, center - (matrix @ center[:, :, None]).squeeze(-1) + moved


def _move(image: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """Take each output pixel from the pixel nearest to its source; pixels from outside the image are black."""
    count, channels, height, width = image.shape
    rows, columns = (torch.arange(side, dtype=torch.float32, device=image.device) for side in (height, width))
    terms = matrix[:, :, 0, None, None] * rows[:, None] + matrix[:, :, 1, None, None] * columns
    row, column = (terms + offset[:, :, None, None]).round().long().unbind(1)
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    source = (row.clamp(0, height - 1) * width + column.clamp(0, width - 1)).view(count, 1, -1)
    moved = image.flatten(2).gather(2, source.expand(-1, channels, -1)).view_as(image)
    return torch.where(inside[:, None], moved, 0)


def _recolored(pixels: Tensor, level: Tensor, signed: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the result of each color operation on all images.

    Args:
        pixels: (n, 3, height, width) floats in [0, 255].
        level: (n, 1, 1, 1) strengths in [0, 1].
        signed: (n, 1, 1, 1) the strengths with a sign.
    """
    factor = 1 + 0.99 * signed
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
    """Equalize the histogram of each channel: all values occur as equally often as integers allow."""
    flat = pixels.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.int64, device=pixels.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    last = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - last) // 255
    below = counts.cumsum(2) - counts
    table = (below + step // 2) // step.clamp_min(1)
    return torch.where(step > 0, table.gather(2, flat), flat).clamp(0, 255).view_as(pixels).float()
