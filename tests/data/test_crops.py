"""Crops fetched by whole lines are those that are computed pixel by pixel, and what they always were."""

import hashlib

import pytest
import torch

from src.data.augment.crops import Bordered
from src.data.augment.pixels import alternating_flip, crop_and_flip, normalize, sample_keys
from src.data.splits import ImageSet

IMAGES = torch.arange(1200 * 3 * 10 * 16).mul(7919).remainder(251).to(torch.uint8).view(1200, 3, 10, 16)
BATCHES = torch.randperm(1200, generator=torch.Generator().manual_seed(0))[:1170].view(9, 130)


@pytest.mark.parametrize("flip", [True, False, "alternating"])
@pytest.mark.parametrize("padding", [0, 1, 4, 9])
@pytest.mark.parametrize("channels", [1, 3])
def test_fetched_is_computed(padding: int, flip: bool | str, channels: int) -> None:
    images, keys = IMAGES[:, :channels], sample_keys(3, 1, BATCHES)
    flips = alternating_flip(3, 1, BATCHES) if isinstance(flip, str) else flip
    fetched = list(Bordered(images, padding).crops(BATCHES, keys, flips))
    assert len(fetched) == len(BATCHES)
    for k, crop in enumerate(fetched):
        which = flips[k] if isinstance(flips, torch.Tensor) else flips
        assert torch.equal(crop, crop_and_flip(images[BATCHES[k]], keys[k], padding, which))


def test_first_and_last_line_of_memory_are_reached() -> None:
    """Of images that are cropped in every way, none but its own pixels is seen."""
    index = torch.zeros(1, 2000, dtype=torch.int64)
    keys = sample_keys(0, 0, torch.arange(2000)[None])
    for image in (IMAGES[:1], IMAGES[1:2]):
        crops = next(Bordered(image, 4).crops(index, keys, True))
        assert torch.equal(crops, crop_and_flip(image.expand(2000, -1, -1, -1), keys[0], 4, True))


@pytest.mark.parametrize("padding", [0, 4])
def test_the_images_are_still_there(padding: int) -> None:
    bordered = Bordered(IMAGES, padding)
    assert torch.equal(bordered.images, IMAGES)
    assert torch.equal(bordered.gather(BATCHES[0]), IMAGES[BATCHES[0]])
    assert bordered.images.untyped_storage().data_ptr() == bordered.lines.untyped_storage().data_ptr()


def test_other_borders_are_made_anew() -> None:
    held = ImageSet(IMAGES, torch.zeros(len(IMAGES), dtype=torch.int64))
    for padding in (4, 4, 1):
        assert held.bordered(padding).padding == padding
        assert torch.equal(held.gather(BATCHES[0]), IMAGES[BATCHES[0]])
    assert held.bordered(1) is held.bordered(1)


def test_no_batches_no_crops() -> None:
    assert list(Bordered(IMAGES, 4).crops(BATCHES[:0], sample_keys(0, 0, BATCHES[:0]), True)) == []


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float32, "e5b56fcf89a01c54"), (torch.float64, "c88d064b445c2e96")]
)
def test_a_batch_is_what_it_always_was(dtype: torch.dtype, expected: str) -> None:
    """The hashes are those of the gather that came before: changed bits would change every experiment."""
    crop = next(Bordered(IMAGES, 4).crops(BATCHES, sample_keys(0, 0, BATCHES), True))
    image = normalize(crop, [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616], dtype)
    assert hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()[:16] == expected
