"""The GAN is the same under every strategy that can train it, resumes, and is evaluated by a classifier."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from PIL import Image

from src.engine.config.build import build
from src.engine.determinism.hashing import hash_ints, normal
from src.engine.parallel.compatibility import check_can_train
from src.engine.run.experiment import assemble, run
from src.engine.utils.errors import UserError
from src.models.gan_frechet import FrechetDistance
from src.models.resnet9 import resnet9
from tests.support.comparison import TOLERANCE, check_resumed, distances
from tests.support.experiments import SHORT, SHORT_STEPS
from tests.support.interruption import die
from tests.support.pool import Pool
from tests.support.runs import STRATEGIES, Record, compose, fit, fit_ranks

TASK = [
    "experiment=gan",
    "module.generator.width=4",
    "module.discriminator.width=4",
    "module.latent=8",
    "data.batch_size=32",
    "trainer.precision=64-true",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=1",
]


@pytest.fixture(scope="module")
def reference(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Record:
    return fit(compose(tmp_path_factory.mktemp("single"), *TASK, *small, *SHORT))


TRAINS = ("auto", "ddp", "ddp_spawn")
WORLDS = [
    pytest.param(strategy, devices, marks=[] if (strategy, devices) == ("ddp", 2) else pytest.mark.slow)
    for strategy in TRAINS
    for devices in (2, 4)
]


@pytest.mark.parametrize("strategy", [strategy for strategy in STRATEGIES if strategy not in TRAINS])
def test_refuses_other_strategies(strategy: str, small: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match="set strategy=ddp"):
        assemble(compose(folder, *TASK, *small, *SHORT, f"strategy={strategy}", "trainer.devices=2"))


def test_rank_without_test_images_counts_none(pool: Pool, small: list[str], folder: Path) -> None:
    """Three test images on four ranks leave one rank without any."""
    few = [*TASK, *small, *SHORT, "trainer.max_steps=1", "trainer.limit_val_batches=0", "data.source.test_size=3"]
    few += ["callbacks.best=null"]
    alone = fit(compose(folder / "alone", *few), test=True).metrics["test/frechet"]
    cfg = compose(folder, *few, "strategy=ddp", "trainer.devices=4")
    for record in fit_ranks(cfg, pool, test=True):
        assert record.metrics["test/frechet"] == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize(("strategy", "devices"), WORLDS)
def test_agrees_with_single_process(
    strategy: str, devices: int, reference: Record, pool: Pool, small: list[str], folder: Path
) -> None:
    cfg = compose(folder, *TASK, *small, *SHORT, f"strategy={strategy}", f"trainer.devices={devices}")
    for record in fit_ranks(cfg, pool):
        assert max(distances(record, reference)) < TOLERANCE
    rows, alone = (list(csv.DictReader((place / "metrics.csv").open())) for place in (folder, reference.file.parent))
    for row, expected in zip(rows, alone, strict=True):
        assert float(row["val/frechet"] or 0) == pytest.approx(float(expected["val/frechet"] or 0), rel=1e-4)


def test_both_networks_learn_and_a_batch_is_one_step(reference: Record) -> None:
    assert len(reference.losses) == SHORT_STEPS
    for name, tensor in reference.initial.items():
        assert not torch.equal(reference.final[name], tensor), name
    assert reference.final["generator.layer1.1.num_batches_tracked"] == SHORT_STEPS


def test_resumes_exactly(reference: Record, pool: Pool, small: list[str], folder: Path) -> None:
    task = [*TASK, *small, *SHORT]
    pool.run(2, die, compose(folder, *task, "strategy=ddp", "trainer.devices=2"), "on_train_batch_end", 3)
    resumed = fit(compose(folder, *task, f"ckpt_path={folder}/died.ckpt"))
    check_resumed([resumed], reference, done=3)


def test_each_loss_has_gradients_of_its_own_network_only(small: list[str], folder: Path) -> None:
    """One backward pass for both losses gives the gradients of two separate passes."""
    trainer, module, data = assemble(compose(folder, *TASK, *small, *SHORT))
    trainer.callbacks.append(checker := _TwoPasses())
    trainer.fit(module, datamodule=data)
    assert checker.steps == SHORT_STEPS


class _TwoPasses(L.Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        for network, which in ((pl_module.generator, 0), (pl_module.discriminator, 1)):
            weights = list(network.parameters())
            alone = torch.autograd.grad(pl_module._losses(batch)[which], weights)
            both = torch.autograd.grad(torch.stack(pl_module._losses(batch)).sum(), weights)
            for a, b in zip(alone, both, strict=True):
                assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
        self.steps += 1


def test_noise_is_normal_and_fixed_by_the_sample() -> None:
    keys = hash_ints(0, torch.arange(2000))
    noise = normal(keys, 100)
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 1) < 0.01
    assert abs(float(torch.corrcoef(noise.T)[0, 1])) < 0.1
    order = torch.randperm(2000)
    assert torch.equal(normal(keys[order], 100), noise[order])


def test_samples_are_laid_out_in_a_square_and_logged_as_an_image(small: list[str], folder: Path) -> None:
    folder /= "logged_samples"  # the run's id must be unique in this process
    options = ["logger=wandb", "trainer.accelerator=cpu", "trainer.max_epochs=1"]
    cfg = compose(folder, *TASK, *small, *SHORT, *options, "callbacks.samples.count=16", quiet=False)
    run(cfg)
    written = np.asarray(Image.open(folder / "samples" / "step000005.png"))
    assert written.shape == (128, 128, 3)
    trainer, module, data = assemble(cfg)
    module.load_state_dict(torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"])
    trainer.datamodule, module.trainer = data, trainer
    samples = data.to_pixels(module.eval().sample(16))  # type: ignore[operator]
    second_row_third = torch.from_numpy(written.copy())[32:64, 64:96].permute(2, 0, 1)
    assert torch.equal(second_row_third, (samples[6] * 255).round().to(torch.uint8))
    (sent,) = folder.glob("wandb/offline-run-*/files/media/images/images/samples_*.png")
    assert np.array_equal(np.asarray(Image.open(sent)), written)


def test_real_images_are_nearer_to_real_ones_than_noise(small: list[str], folder: Path) -> None:
    """Features come from a classifier trained in the test, and from a network with random weights."""
    fit(compose(folder, *small, "model.width=4", "data.batch_size=16", "trainer.max_epochs=2"))
    data = build(compose(folder, *small).data)
    pixels = data.source.load(data.root, "train")[0].float() / 255
    _, gan, _ = assemble(compose(folder, *TASK, *small, *SHORT))
    for feature_checkpoint in (str(folder / "checkpoints" / "last.ckpt"), None):
        callback = FrechetDistance(partial(resnet9, 10), feature_checkpoint)
        callback.setup(L.Trainer(accelerator="cpu", logger=False), gan, "fit")
        far = []
        for fake in (pixels[200:], pixels[200:] * 0.5 + 0.5 * torch.rand(200, 3, 32, 32), torch.rand(200, 3, 32, 32)):
            distance = callback._distance
            assert distance is not None
            distance.update(pixels[:200], real=True)
            distance.update(fake, real=False)
            far.append(float(distance.compute()))
            distance.reset()
        assert far[0] < far[1] < far[2]


def test_refuses_invalid_options(reference: Record, small: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match=r"frechet.feature_checkpoint=.* is not a complete checkpoint"):
        run(compose(folder, *TASK, *small, *SHORT, f"callbacks.frechet.feature_checkpoint={Path(__file__)}"))
    own = reference.file.parent / "checkpoints" / "last.ckpt"
    with pytest.raises(UserError, match=r"frechet.feature_checkpoint=.* is not a checkpoint of a classifier"):
        run(compose(folder, *TASK, *small, *SHORT, f"callbacks.frechet.feature_checkpoint={own}"))
    for alone in ("samples", "frechet"):
        with pytest.raises(UserError, match=f"callbacks.{alone} is for modules that generate images"):
            run(compose(folder, *small, "model=mlp", "data.batch_size=16", f"callbacks=[default,{alone}]"))
    with pytest.raises(UserError, match=r"callbacks.samples.count=50"):
        run(compose(folder, *TASK, *small, *SHORT, "callbacks.samples.count=50"))
    with pytest.raises(UserError, match="gradient_clip_val"):
        run(compose(folder, *TASK, *small, *SHORT, "trainer.gradient_clip_val=1.0"))
    _, module, _ = assemble(compose(folder, *TASK, *small, *SHORT))
    with pytest.raises(UserError, match=r"strategy=modelparallel .* set strategy=ddp"):
        check_can_train(ModelParallelStrategy(), module)
