"""The GAN is the same under every strategy that can train it, resumes, and is evaluated by a classifier."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

from onecurve.random.hashing import hash_ints, normal
from onecurve.run.experiment import assemble, run_experiment
from tests.support.comparison import TOLERANCE, check_resumed, distances
from tests.support.experiments import SHORT, SHORT_STEPS
from tests.support.interruption import die
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit, fit_ranks

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


@pytest.mark.parametrize(("strategy", "devices"), WORLDS)
def test_agrees_with_single_process(
    strategy: str, devices: int, reference: Record, pool: Pool, small: list[str], folder: Path
) -> None:
    cfg = compose(folder, *TASK, *small, *SHORT, f"strategy={strategy}", f"trainer.devices={devices}")
    for record in fit_ranks(cfg, pool):
        assert max(distances(record, reference)) < TOLERANCE


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


def test_samples_are_laid_out_in_a_square(small: list[str], folder: Path) -> None:
    cfg = compose(folder, *TASK, *small, *SHORT, "trainer.max_epochs=1", "callbacks.samples.count=16")
    run_experiment(cfg)
    written = np.asarray(Image.open(folder / "samples" / "step000005.png"))
    assert written.shape == (128, 128, 3)
    trainer, module, data = assemble(cfg)
    module.load_state_dict(torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"])
    trainer.datamodule, module.trainer = data, trainer
    samples = data.to_pixels(module.eval().sample(16))  # type: ignore[operator]
    second_row_third = torch.from_numpy(written.copy())[32:64, 64:96].permute(2, 0, 1)
    assert torch.equal(second_row_third, (samples[6] * 255).round().to(torch.uint8))
