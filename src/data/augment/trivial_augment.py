"""TrivialAugment for a batch on its device: one random operation per image, at a random strength.

Müller and Hutter, "TrivialAugment: tuning-free yet state-of-the-art data augmentation" (2021), the wide search space:
14 operations at 31 strengths. Every image goes through all operations, with neutral coefficients for all but its own:
to select the images of an operation would need a host-device synchronization. A GPU is busy with the number of kernels,
not with their size, so operations share kernels.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from src.engine import device_constant, integers

OPERATIONS = (
    *("identity", "shear x", "shear y", "translate x", "translate y", "rotate", "brightness", "color", "contrast"),
    *("sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
_LEVELS = 31
# One column per coefficient: its value for the operations that use it, in units of the level with or without sign.
_SIGNED = (
    *({"rotate": math.radians(135)}, {"shear x": 0.99}, {"shear y": 0.99}, {"translate y": 32.0}),
    *({"translate x": 32.0}, {"brightness": 0.99}, {"color": 0.99, "contrast": 0.99}, {"sharpness": 0.99}),
)
_UNSIGNED = ({"posterize": 6.0}, {"solarize": -1.0})
# Columns that are added: of the center of a rotation, and to the columns without sign.
_OFFSETS: tuple[dict[str, float], ...] = ({"rotate": 1.0}, {}, {"solarize": 1.0})


def trivial_augment(image: Tensor, keys: Tensor) -> Tensor:
    """Apply one random operation to each of (n, 3, height, width) uint8 images; `keys` are (n,)."""
    operation, level, sign = integers(keys, (5, 6, 7), (len(OPERATIONS), _LEVELS, 2))
    strength = level / (_LEVELS - 1)
    return apply_operations(image, operation, strength, strength.copysign(sign - 0.5))


def apply_operations(image: Tensor, operation: Tensor, level: Tensor, signed_level: Tensor) -> Tensor:
    """Apply to each image its operation.

    Args:
        image: (n, 3, height, width) uint8.
        operation: (n,) indices into `OPERATIONS`.
        level: (n,) strengths in [0, 1].
        signed_level: (n,) strengths in [-1, 1], for operations that have a direction.
    """
    signed, unsigned, offset = _coefficients(image.device).index_select(0, operation).split((8, 2, 3), 1)
    amount = signed * signed_level[:, None]
    moved = _warp(image, amount[:, :5], offset[:, :1])
    contrast, autocontrast, equalize = _masks(image.device).index_select(1, operation)
    pixels = _stretch_histograms(moved, autocontrast, equalize)
    pixels = _blend(pixels, 1 + amount[:, 5:], contrast)
    exponent, threshold = torch.addcmul(offset[:, 1:], unsigned, level[:, None])[..., None, None].split(1, 1)
    pixels = pixels - pixels.remainder(exponent.round().exp2())  # posterize
    pixels = torch.where(pixels >= 255 * threshold, 255 - pixels, pixels)  # solarize
    return pixels.clamp_(0, 255).to(torch.uint8)


@device_constant
def _coefficients(device: torch.device) -> Tensor:
    """Return the coefficients as (operations, columns): `_SIGNED`, `_UNSIGNED` and `_OFFSETS`."""
    neutral = (*(0.0 for _ in (*_SIGNED, *_UNSIGNED)), 0.0, 0.0, math.inf)  # no pixel reaches an infinite threshold
    columns = zip((*_SIGNED, *_UNSIGNED, *_OFFSETS), neutral, strict=True)
    rows = [[column.get(name, default) for name in OPERATIONS] for column, default in columns]
    return torch.tensor(rows, dtype=torch.float32, device=device).T.contiguous()


@device_constant
def _masks(device: torch.device) -> Tensor:
    """Return which operation is contrast, autocontrast and equalize, as (3, operations) bool."""
    names = ("contrast", "autocontrast", "equalize")
    return torch.tensor([[name == operation for operation in OPERATIONS] for name in names], device=device)


def _warp(image: Tensor, amount: Tensor, is_rotated: Tensor) -> Tensor:
    """Take each output pixel from the pixel nearest to its source; pixels from outside the image are black.

    Args:
        image: (n, 3, height, width) uint8.
        amount: (n, 5) angles, shears along x and y, and shifts along y and x.
        is_rotated: (n, 1) ones for rotated images, and zeros.
    """
    count, channels, height, width = image.shape
    rows, columns, last, center = _grid(height, width, image.device)
    matrix, offset = _affine_maps(amount, is_rotated * center)
    matrix, offset = matrix[..., None, None], offset[..., None, None]  # to broadcast with the pixels
    position = (matrix[:, :, 0] * rows + matrix[:, :, 1] * columns + offset).round_()  # (n, 2, height, width)
    nearest = position.clamp_min(0).minimum(last)
    is_inside = (nearest == position).all(1)
    row, column = nearest.long().unbind(1)
    source = torch.add(column, row, alpha=width).view(count, 1, -1)
    warped = image.flatten(2).gather(2, source.expand(-1, channels, -1)).view_as(image)
    return warped * is_inside[:, None]


@device_constant
def _grid(height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows and columns of the pixels, the last of both as (2, 1, 1), and the center (row, column)."""
    rows = torch.arange(height, dtype=torch.float32, device=device)[:, None]
    columns = torch.arange(width, dtype=torch.float32, device=device)
    last = torch.tensor([height - 1, width - 1], dtype=torch.float32, device=device)
    return rows, columns, last[:, None, None], last / 2


def _affine_maps(amount: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the (n, 2, 2) matrices and (n, 2) offsets that map an output pixel (row, column) to its source.

    `amount` is that of `_warp`, and `fixed` are the (n, 2) points that keep their places: a rotation keeps the image's
    center, the other operations keep pixel (0, 0).
    """
    angle, shear_x, shear_y = amount[:, :3].unbind(1)
    cos, sin = angle.cos(), angle.sin()
    matrix = torch.stack([cos, shear_y - sin, shear_x + sin, cos], -1).view(-1, 2, 2)
    return matrix, fixed - (matrix @ fixed[:, :, None]).squeeze(-1) + amount[:, 3:].trunc()


def _stretch_histograms(image: Tensor, autocontrast: Tensor, equalize: Tensor) -> Tensor:
    """Return the images as floats, some of them with stretched or equalized histograms of each channel.

    Args:
        image: (n, 3, height, width) uint8.
        autocontrast, equalize: (n,) bool.
    """
    values = image.flatten(2).long()
    low, high = values.aminmax(dim=2, keepdim=True)
    pixels = _equalization(values, high, equalize[:, None, None]).gather(2, values)
    spread = high - low
    stretched = (pixels - low).mul_(255).div_(spread.clamp_min(1))
    return torch.where(autocontrast[:, None, None] & (spread > 0), stretched, pixels).view(image.shape)


def _equalization(values: Tensor, high: Tensor, selected: Tensor) -> Tensor:
    """Return the new value of each value as (n, 3, 256) floats: all then occur equally often, as far as integers allow.

    Images that are not selected keep their values. So do channels of one value, or with too few pixels.

    Args:
        values: (n, 3, pixels) int64.
        high: (n, 3, 1) greatest values.
        selected: (n, 1, 1) bool.
    """
    every_value, one = _histogram_constants(values.device)
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.int64, device=values.device)
    counts.scatter_add_(2, values, one.expand_as(values))
    step = (values.shape[2] - counts.gather(2, high)) // 255
    below = counts.cumsum(2) - counts
    table = (below + step // 2) // step.clamp_min(1)
    return torch.where(selected & (step > 0), table, every_value)


@device_constant
def _histogram_constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 256 values as floats, and an integer one."""
    return torch.arange(256, dtype=torch.float32, device=device), torch.ones((), dtype=torch.int64, device=device)


def _blend(pixels: Tensor, factor: Tensor, contrast: Tensor) -> Tensor:
    """Return each image's blend with black, its gray or mean, or its blurred version.

    Args:
        pixels: (n, 3, height, width) floats.
        factor: (n, 3) fractions of the image: in its blend with black, with gray, and with the blurred image.
        contrast: (n,) bool that selects the mean of the image instead of its gray.
    """
    brightness, color, sharpness = factor[..., None, None].split(1, 1)
    weights = _gray_weights(pixels.device)
    red, green, blue = (pixels * weights).split(1, dim=1)
    gray = (red + green).add_(blue).round_()
    gray = torch.where(contrast[:, None, None, None], gray.mean((1, 2, 3), keepdim=True).round_(), gray)
    blended = torch.lerp(gray.expand_as(pixels), pixels, color).mul_(brightness)
    center = pixels[:, :, 1:-1, 1:-1]
    around = F.avg_pool2d(pixels, 3, 1, divisor_override=1)
    smooth = torch.add(around, center, alpha=4).div_(13).round_()
    inner = blended[:, :, 1:-1, 1:-1]
    inner.copy_(torch.lerp(smooth, inner, sharpness))  # the border stays as it is
    return blended


@device_constant
def _gray_weights(device: torch.device) -> Tensor:
    return torch.tensor([0.299, 0.587, 0.114], dtype=torch.float32, device=device)[:, None, None]
