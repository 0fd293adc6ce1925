"""Mixup and CutMix follow their papers, and do not depend on the number of processes and micro-batches."""

import numpy as np
import pytest
import torch

from onecurve.data.layout import BatchLayout
from src.data.augment.augmentation import Augmentation
from src.data.augment.mixing import cutmix, mixup

IMAGES = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 32, 32).contiguous()  # all pixels of image k are k
TARGETS = torch.eye(8)
LAYOUT = BatchLayout(8, has_pairs=True)  # the partner of row k is row (k + 4) % 8


@pytest.mark.parametrize("mix", [mixup, cutmix])
def test_targets_follow_the_fraction_of_the_partner_in_the_image(mix: object) -> None:
    fractions = set()
    for seed in range(50):
        image, target = mix(IMAGES, TARGETS, LAYOUT.partners, 1.0, np.random.default_rng(seed))  # type: ignore[operator]
        fraction = target[0, 4]
        assert torch.allclose(target, (1 - fraction) * TARGETS + fraction * TARGETS.roll(4, 0))
        assert torch.allclose(
            image.mean((1, 2, 3)), (1 - fraction) * IMAGES[:, 0, 0, 0] + fraction * IMAGES.roll(4, 0)[:, 0, 0, 0]
        )
        fractions.add(round(float(fraction), 3))
    assert min(fractions) < 0.15
    assert max(fractions) > 0.6


def test_cutmix_pastes_a_box() -> None:
    image, _ = cutmix(IMAGES, TARGETS, LAYOUT.partners, 1.0, np.random.default_rng(1))
    pasted = image[0, 0] == 4
    rows, columns = pasted.any(1), pasted.any(0)
    assert pasted.sum() == rows.sum() * columns.sum() > 0
    assert torch.equal(image[0, 1], image[0, 0])


def test_step_applies_mixup_or_cutmix_with_the_given_probability() -> None:
    augment = Augmentation(mixup=1.0, cutmix=1.0, mix_probability=0.5)
    ways = []
    for step in range(200):
        image, target = augment.mix(IMAGES, torch.arange(8), LAYOUT, seed=0, step=step, num_classes=10)
        assert target.shape == (8, 10)
        values = len(image[0].unique())
        ways.append("none" if torch.equal(image, IMAGES) else "cutmix" if values == 2 else "mixup")
    assert 80 < ways.count("none") < 120
    assert min(ways.count("mixup"), ways.count("cutmix")) > 30
