"""The whitening layer and its callback: filters from training images.

tests/engine/parity has it under strategies.
"""

from pathlib import Path

import pytest
import torch

from src.models.whitening import Whitening
from tests.support.runs import compose, fit

IMAGES = torch.nn.functional.avg_pool2d(
    torch.randn(200, 3, 34, 34, generator=torch.Generator().manual_seed(0)), 3, stride=1
)
NET = ["model=airbench", "model.widths=[8,8,8]", "data.batch_size=16", "trainer.max_epochs=1"]
TASK = [*NET, "callbacks=[default,whitening]", "trainer.limit_train_batches=4", "trainer.limit_val_batches=1"]
FILTERS, BIAS = "net.layer1.whitening.weight", "net.layer1.whitening.bias"


def fitted() -> Whitening:
    layer = Whitening(3, 2)
    assert not layer.has_computed_filters
    layer.weight.data.copy_(layer.compute_filters(IMAGES, eps=1e-9))
    assert layer.has_computed_filters
    return layer


def test_whitens_patches_and_negates_them() -> None:
    layer = fitted()
    layer.bias.data.zero_()
    values = layer(IMAGES).detach().transpose(0, 1).flatten(1)
    assert torch.equal(values[:12], -values[12:])
    covariance = values[:12] @ values[:12].T / values.shape[1]
    assert torch.allclose(covariance, torch.eye(12), atol=1e-2)


def test_filters_do_not_depend_on_the_order_of_the_images() -> None:
    layer = Whitening(3, 2)
    assert torch.allclose(layer.compute_filters(IMAGES.flip(0)), layer.compute_filters(IMAGES), atol=1e-4)


def test_initialized_filters_are_kept(small: list[str], cifar: Path, folder: Path) -> None:
    first = fit(compose(folder, *small, *TASK)).final[FILTERS]
    others = ["data=cifar10", f"data.root={cifar}"]
    started = fit(compose(folder / "new", *others, *TASK, f"init_from={folder}/checkpoints/last.ckpt"))
    fresh = fit(compose(folder / "fresh", *others, *TASK))
    assert torch.equal(started.final[FILTERS], first)
    assert not torch.allclose(fresh.final[FILTERS], first)


def test_speedrun_trains_on_all_images_without_warnings(
    small: list[str], folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    tiny = ["data.batch_size=20", "model.widths=[8,8,8]", "trainer.max_epochs=2", "trainer.log_every_n_steps=5"]
    record = fit(compose(folder, *small, "experiment=speedrun", *tiny), test=True)
    assert sorted(index for batch in record.indices[:20] for index in batch) == list(range(400))
    assert not [str(warning.message) for warning in recwarn if "DataLoader" in str(warning.message)]
    assert sorted(file.name for file in (folder / "checkpoints").iterdir()) == ["last.ckpt"], "it saves once"
    assert torch.load(folder / "checkpoints" / "last.ckpt")["global_step"] == 40
    assert {"test/acc", "test/acc_tta"} <= record.metrics.keys()
    assert not {"val/acc", "val/loss"} & record.metrics.keys()
