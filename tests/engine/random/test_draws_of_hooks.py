"""Samples, steps and hooks draw other numbers each time, as in plain Lightning."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import onecurve

BIT_EXACT = {"bit_exact": True, "virtual_ranks": 2}


class Drawing(L.LightningModule):
    """Draws in a hook, or in a step."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        self.net, self.hook, self.drawn = nn.Linear(4, 1), hook, list[tuple[float, float, float]]()

    def draw(self, hook: str) -> None:
        if hook == self.hook:
            self.drawn.append((float(torch.rand(())), np.random.rand(), random.random()))

    def on_train_epoch_start(self) -> None:
        self.draw("on_train_epoch_start")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.draw("training_step")
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.draw("validation_step")

    def on_validation_epoch_end(self) -> None:
        self.draw("on_validation_epoch_end")

    def on_train_epoch_end(self) -> None:
        self.draw("on_train_epoch_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def drawn(folder: Path, hook: str, kind: type[Drawing] = Drawing, **options: Any) -> list[tuple[float, float, float]]:
    """Return what a hook draws from torch, NumPy and Python in a run of three epochs."""
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = onecurve.Trainer(
        accelerator="cpu", devices=1, max_epochs=3, num_sanity_val_steps=0, default_root_dir=folder, **quiet, **options
    )
    module, samples = kind(hook), TensorDataset(torch.randn(16, 4))
    evaluated = [DataLoader(samples, 4), DataLoader(samples, 8)]
    trainer.fit(module, DataLoader(samples, 4, shuffle=True), evaluated)
    return module.drawn


@pytest.mark.parametrize("options", [{}, BIT_EXACT], ids=["together", "one by one"])
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "training_step", "on_train_epoch_end"])
def test_each_call_draws_other_numbers(hook: str, options: dict[str, Any], folder: Path) -> None:
    calls = drawn(folder, hook, **options)
    assert len(calls) >= 3
    assert all(len(set(numbers)) == len(calls) for numbers in zip(*calls, strict=True))


@pytest.mark.parametrize("options", [{}, BIT_EXACT], ids=["together", "one by one"])
def test_batches_of_an_evaluation_have_other_numbers_of_torch(options: dict[str, Any], folder: Path) -> None:
    """A diffusion model is evaluated at random steps. The next epoch has the same ones."""
    of_torch = [numbers[0] for numbers in drawn(folder, "validation_step", **options)]
    batches = len(of_torch) // 3
    assert of_torch == of_torch[:batches] * 3
    assert len(set(of_torch)) == batches >= 6


@pytest.mark.parametrize("options", [{"accumulate_grad_batches": 2}, BIT_EXACT], ids=["divided", "one by one"])
def test_the_end_of_an_evaluation_draws_the_same_numbers_on_any_hardware(options: dict[str, Any], folder: Path) -> None:
    """Its batches have other seeds on one process than where they are divided."""
    hook = "on_validation_epoch_end"
    assert drawn(folder / "one", hook) == drawn(folder / "other", hook, **options)


class AfterStep(Drawing):
    """Computes the batch again, with dropout, in the hook of its end."""

    def __init__(self) -> None:
        super().__init__("")
        self.net, self.outputs = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1)), list[float]()  # type: ignore[assignment]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(float(self.net(batch[0]).detach().double().sum()))


def test_dropout_at_the_end_of_a_batch_has_the_same_masks_on_any_hardware(folder: Path) -> None:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    samples, outputs = TensorDataset(torch.randn(16, 4)), []
    for accumulate in (1, 2):
        trainer = onecurve.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=2,
            accumulate_grad_batches=accumulate,
            default_root_dir=folder / str(accumulate),
            **quiet,
        )
        module = AfterStep()
        trainer.fit(module, DataLoader(samples, 8, shuffle=True))
        outputs.append(module.outputs)
    assert outputs[1] == pytest.approx(outputs[0], rel=1e-4, abs=1e-5)


class Transferring(Drawing):
    """Draws noise for the batches of an evaluation."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if not self.training:
            self.draw("on_after_batch_transfer")
        return batch


def test_loaders_of_an_evaluation_have_other_noise(folder: Path) -> None:
    noise = drawn(folder, "on_after_batch_transfer", Transferring)
    batches = len(noise) // 3
    assert len(set(noise)) == batches == 6


class Masks(Drawing):
    """Keeps the masks that functions and a layer have in a step, and in hooks that follow it."""

    def __init__(self) -> None:
        super().__init__("")
        self.dropout, self.masks, self.samples = nn.Dropout(0.5), list[bytes](), 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.samples = len(batch[0])
        self.keep()
        return super().training_step(batch, batch_idx)

    def keep(self) -> None:
        ones = torch.ones(self.samples, 32)
        self.masks += [drop(ones).numpy().tobytes() for drop in (self.dropout, F.dropout)]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.keep()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.keep()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.keep()


def assert_masks_differ(module: Masks, folder: Path, **options: Any) -> None:
    """Train two steps."""
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = onecurve.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=folder, **quiet, **options)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(16, 4)), 8, shuffle=True))
    assert len(set(module.masks)) == len(module.masks) >= 16


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, BIT_EXACT])
def test_hooks_of_a_step_have_other_masks_than_the_step(options: dict[str, Any], folder: Path) -> None:
    assert_masks_differ(Masks(), folder, **options)


class Learners(Masks):
    """Trains two copies of a network in each step, as MAML does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 1))  # type: ignore[assignment]

    def keep(self) -> None:
        learners: list[Any] = [self.net, copy.deepcopy(self.net), copy.deepcopy(self.net)]
        self.masks += [learner[0](torch.ones(self.samples, 32)).numpy().tobytes() for learner in learners]


@pytest.mark.parametrize("options", [{}, BIT_EXACT], ids=["together", "one by one"])
def test_copies_that_a_step_makes_have_other_masks(options: dict[str, Any], folder: Path) -> None:
    assert_masks_differ(Learners(), folder, **options)


class Noise(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([torch.rand(()), np.random.rand(), random.random()], dtype=torch.float64)


class Comparing(Drawing):
    """Draws what the transform of its sample may have drawn."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.draw("training_step")
        self.drawn += batch.tolist()
        return self.net.weight.square().mean()


def test_a_step_draws_other_numbers_than_the_transforms_of_its_sample(folder: Path) -> None:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = onecurve.Trainer(accelerator="cpu", devices=1, max_epochs=1, default_root_dir=folder, **quiet)
    module = Comparing("training_step")
    trainer.fit(module, DataLoader(Noise(), batch_size=1))
    assert len(module.drawn) == 12
    assert all(len(set(numbers)) == 12 for numbers in zip(*module.drawn, strict=True))


def test_a_script_draws_other_numbers_after_each_fit(folder: Path) -> None:
    """So a random search tries other values in each trial, although each trainer begins with its seed."""
    values = []
    for trial in range(3):
        drawn(folder / str(trial), "training_step")
        values.append((float(torch.rand(())), np.random.rand(), random.random()))
    assert len({value for row in values for value in row}) == 9


class Repeating(Drawing):
    """Keeps the mask of each sample, of which the loader gives some several times in an epoch."""

    def __init__(self) -> None:
        super().__init__("")
        self.drop, self.masks = nn.Dropout(0.5), list[tuple[int, bytes]]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for number, mask in zip(batch[1].tolist(), self.drop(torch.ones(len(batch[1]), 64)), strict=True):
            self.masks.append((number, mask.numpy().tobytes()))
        return super().training_step(batch, batch_idx)


def test_a_sample_that_comes_again_in_an_epoch_has_another_mask(folder: Path) -> None:
    module, samples = Repeating(), TensorDataset(torch.randn(4, 4), torch.arange(4))
    repeated = torch.utils.data.SubsetRandomSampler([0, 1, 2, 3] * 4)
    trainer = onecurve.Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, default_root_dir=folder)
    trainer.fit(module, DataLoader(samples, 1, sampler=repeated))
    assert len(module.masks) == len(set(module.masks)) == 16


class Noisy(Drawing):
    """Keeps the noise of each sample, which the step draws several times."""

    def __init__(self) -> None:
        super().__init__("")
        self.noise = list[bytes]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for _ in range(4):
            self.noise += [row.numpy().tobytes() for row in torch.randn_like(torch.ones(len(batch[0]), 8))]
        return super().training_step(batch, batch_idx)


def test_samples_and_calls_of_a_step_have_other_numbers(folder: Path) -> None:
    """The fourth call for the third sample has other ones than the third call for the fourth."""
    module = Noisy()
    trainer = onecurve.Trainer(accelerator="cpu", devices=1, max_epochs=8, logger=False, default_root_dir=folder)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 4)), 4))
    assert len(set(module.noise)) == len(module.noise) == 8 * 8 * 4


class NoiseStream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (Noise()[0] for _ in range(6))


class Collecting(Comparing):
    """Collects what the datasets of all stages draw, and the noise of each sample of an evaluation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.drawn += batch.tolist() + torch.randn_like(batch).tolist()

    test_step = validation_step


@pytest.mark.parametrize("kind", [Noise, NoiseStream])
def test_loaders_and_stages_have_other_samples(kind: Any, folder: Path) -> None:
    """A dataset may make its samples: those of a validation must not be the ones that are trained, or tested."""
    trainer = onecurve.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, num_sanity_val_steps=0, logger=False, default_root_dir=folder
    )
    module, loaders = Collecting(""), [DataLoader(kind(), batch_size=3) for _ in range(2)]
    trainer.fit(module, DataLoader(kind(), batch_size=3), loaders)
    trainer.test(module, loaders)
    assert len(module.drawn) == 6 + 2 * 4 * 6
    assert all(len(set(numbers)) == len(module.drawn) for numbers in zip(*module.drawn, strict=True))


class MadeNoise(L.LightningDataModule):
    """Makes the samples of each loader where it returns it."""

    def loader(self) -> DataLoader[Any]:
        return DataLoader(torch.stack([Noise()[0] for _ in range(6)]), batch_size=3)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = test_dataloader = loader


def test_methods_of_a_data_module_make_other_samples(folder: Path) -> None:
    trainer = onecurve.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, num_sanity_val_steps=0, logger=False, default_root_dir=folder
    )
    module = Collecting("")
    trainer.fit(module, datamodule=MadeNoise())
    trainer.test(module, datamodule=MadeNoise())
    assert all(len(set(numbers)) == len(module.drawn) == 6 + 2 * 12 for numbers in zip(*module.drawn, strict=True))
