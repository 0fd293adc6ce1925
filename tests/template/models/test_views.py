"""Test-time augmentation averages the views correctly, in the test only, beside the plain accuracy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from onecurve.run.experiment import assemble
from src.data.augment.pixels import normalize
from src.models.views import average_over_views
from tests.support.runs import Record, compose

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def pixels(image: Tensor) -> Tensor:
    """Return the image as logits."""
    return image.flatten(1)


def test_mirror_averages_two_views() -> None:
    found = average_over_views(pixels, IMAGES, pixels(IMAGES), "mirror").view_as(IMAGES)
    assert torch.allclose(found, (IMAGES + IMAGES.flip(-1)) / 2)


def test_shifted_views_have_half_of_the_weight() -> None:
    found = average_over_views(pixels, IMAGES, pixels(IMAGES), "shift").view_as(IMAGES)
    padded = F.pad(IMAGES, (1, 1, 1, 1), mode="reflect")
    views = [(IMAGES, 0.25), (padded[..., :8, :8], 0.125), (padded[..., 2:, 2:], 0.125)]
    expected = torch.stack([weight * (view + view.flip(-1)) for view, weight in views]).sum(0)
    assert torch.allclose(found, expected)
    constant = torch.ones(1, 3, 8, 8)
    assert torch.allclose(average_over_views(pixels, constant, pixels(constant), "shift"), torch.ones(1, 192))


def test_is_logged_beside_the_plain_accuracy(small: list[str], folder: Path) -> None:
    trainer, module, data = assemble(compose(folder, *small, "model=mlp", "module.tta=shift"))
    found = trainer.test(module, datamodule=data, verbose=False)[0]
    dataset = data.splits["test"].dataset
    image = normalize(dataset.images, data.mean, data.std, torch.float32)
    with torch.no_grad():
        plain = module.eval()(image)
        averaged = average_over_views(module, image, plain, "shift")
    accuracies = [float((logits.argmax(1) == dataset.labels).float().mean()) for logits in (plain, averaged)]
    assert [found["test/acc"], found["test/acc_tta"]] == pytest.approx(accuracies)
    assert accuracies[0] != accuracies[1]


def test_is_exact_on_two_processes(alone: Callable[..., Record], short_run: Callable[..., list[Record]]) -> None:
    expected = alone("module.tta=shift").metrics["test/acc_tta"]
    for record in short_run("module.tta=shift", "strategy=pipeline", "trainer.devices=2"):
        assert record.metrics["test/acc_tta"] == pytest.approx(expected, abs=1e-12)
