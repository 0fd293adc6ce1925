"""Transforms of the user change an image by (seed, epoch, sample) alone, on any number of processes and workers."""

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from onecurve.data.layout import DataParallelInfo, Division
from onecurve.data.rank_batches import TrainingBatches
from onecurve.data.rank_loader import RankLoader
from onecurve.errors import UserError
from onecurve.random.hashing import permutation
from src.data.images import ImageSet, ImageSplit, TransformedSplit, join


class Noise:
    """Replaces an image by noise of the global generators of torch, NumPy and Python."""

    def __call__(self, image: Tensor) -> Tensor:
        values = [int(torch.randint(256, ())), int(np.random.randint(256)), random.randrange(256)]
        return torch.tensor(values, dtype=torch.uint8)[:, None, None].expand(image.shape)


def to_float(image: Tensor) -> Tensor:
    return image / 255


def images_by_sample(
    dp_size: int = 1, accumulate: int = 1, epoch: int = 0, seed: int = 0, transform: Any = None
) -> dict[int, list[int]]:
    """Return the first pixel of each training image of an epoch, whichever rank and batch it belongs to."""
    split = ImageSplit(ImageSet(torch.zeros(48, 3, 4, 4, dtype=torch.uint8), torch.zeros(48)), torch.arange(48))
    found: dict[int, list[int]] = {}
    for rank in range(dp_size):
        division = Division(DataParallelInfo(dp_size, rank), accumulate)
        batches = TrainingBatches(lambda epoch: permutation(48, seed, epoch).split(16), division, 3)
        batches.set_epoch(epoch)
        data = TransformedSplit(split, [transform or Noise()])
        loader: Any = DataLoader(data, 16, shuffle=True, collate_fn=join)
        for part in chain.from_iterable(RankLoader(loader, batches, seed, torch.device("cpu"))):
            index, images = part.batch.sample_index, part.batch.image
            found |= dict(zip(index.tolist(), images[:, :, 0, 0].tolist(), strict=True))
    return found


def test_images_depend_only_on_seed_epoch_and_sample() -> None:
    alone = images_by_sample()
    assert len(alone) == 48
    for generator in range(3):
        assert len({image[generator] for image in alone.values()}) > 20, "samples differ"
    assert images_by_sample(dp_size=2) == images_by_sample(accumulate=2) == alone
    assert images_by_sample(epoch=1) != alone
    assert images_by_sample(seed=1) != alone


def test_generators_keep_their_states() -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    images_by_sample()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert random.getstate() == states[2]


@pytest.mark.parametrize("transform", [to_float, lambda image: image[:, :3]])
def test_refuses_other_types_and_shapes(transform: Any) -> None:
    with pytest.raises(UserError, match=r"data.augment.transforms: .* returns .*, but must return torch.uint8 \(3, 4"):
        images_by_sample(transform=transform)
