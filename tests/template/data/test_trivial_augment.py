"""TrivialAugment's operations on a batch agree with Pillow's on each image, and each of them occurs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from src.data.augment.pixels import sample_keys
from src.data.augment.trivial_augment import OPERATIONS, apply_operations, trivial_augment
from src.data.sources.shapes import generate_images

IMAGES = torch.from_numpy(generate_images(8, seed=0)[0])
PILLOW: dict[str, Callable[[Any, float, float], Any]] = {
    "identity": lambda image, level, sign: image,
    "shear x": lambda image, level, sign: _affine(image, 1, 0.99 * sign * level, 0, 0, 1, 0),
    "shear y": lambda image, level, sign: _affine(image, 1, 0, 0, 0.99 * sign * level, 1, 0),
    "translate x": lambda image, level, sign: _affine(image, 1, 0, int(32 * sign * level), 0, 1, 0),
    "translate y": lambda image, level, sign: _affine(image, 1, 0, 0, 0, 1, int(32 * sign * level)),
    "rotate": lambda image, level, sign: image.rotate(-135 * sign * level),
    "brightness": lambda image, level, sign: ImageEnhance.Brightness(image).enhance(1 + 0.99 * sign * level),
    "color": lambda image, level, sign: ImageEnhance.Color(image).enhance(1 + 0.99 * sign * level),
    "contrast": lambda image, level, sign: ImageEnhance.Contrast(image).enhance(1 + 0.99 * sign * level),
    "sharpness": lambda image, level, sign: ImageEnhance.Sharpness(image).enhance(1 + 0.99 * sign * level),
    "posterize": lambda image, level, sign: ImageOps.posterize(image, 8 - round(6 * level)),
    "solarize": lambda image, level, sign: ImageOps.solarize(image, round(255 * (1 - level))),
    "autocontrast": lambda image, level, sign: ImageOps.autocontrast(image),
    "equalize": lambda image, level, sign: ImageOps.equalize(image),
}
FRACTION_OFF = {"shear x": 0.3, "shear y": 0.3, "rotate": 0.05}  # fraction of pixels that Pillow rounds to a neighbor


def _affine(image: Any, *coefficients: float) -> Any:
    return image.transform(image.size, Image.Transform.AFFINE, coefficients)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("level", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_operations_agree_with_pillow(name: str, level: float, sign: int) -> None:
    count = len(IMAGES)
    operation, levels = torch.full((count,), OPERATIONS.index(name)), torch.full((count,), level)
    ours = apply_operations(IMAGES, operation, levels, sign * levels)
    for image, mine in zip(IMAGES, ours, strict=True):
        drawn = PILLOW[name](Image.fromarray(image.permute(1, 2, 0).numpy()), level, sign)
        theirs = torch.from_numpy(np.array(drawn)).permute(2, 0, 1)
        off = (mine.int() - theirs.int()).abs() > 1
        assert off.float().mean() <= FRACTION_OFF.get(name, 0.0)


def test_every_operation_occurs_and_depends_on_the_sample_only() -> None:
    many = IMAGES[:1].expand(2000, -1, -1, -1)
    keys = sample_keys(0, 0, torch.arange(2000))
    expected = trivial_augment(many, keys)
    assert expected.dtype == torch.uint8
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(trivial_augment(many, keys[order]), expected[order])
    assert len(expected.flatten(1).unique(dim=0)) > 250  # of at most 14 x 31 x 2
