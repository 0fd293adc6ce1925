"""Errors of Lightning in one line, also for a script."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

import onecurve
from onecurve.errors import UserError
from tests.support.pool import Pool, RankFailed


class CachesPositions(BoringModel):
    """Registers a buffer in the forward pass, so that its checkpoints have one that a new module does not."""

    def forward(self, x: Any) -> Any:
        if not hasattr(self, "positions"):
            self.register_buffer("positions", torch.arange(32.0))
        return super().forward(x)


def test_a_continued_run_of_another_network(folder: Path) -> None:
    def fit(max_epochs: int) -> None:
        options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": folder}
        trainer = onecurve.Trainer(**options, max_epochs=max_epochs, seed=0)
        trainer.fit(CachesPositions(), DataLoader(RandomDataset(32, 16), batch_size=8), ckpt_path="last")

    fit(1)
    with pytest.raises(UserError, match=r"^ckpt_path contains another network .*Unexpected key.*positions.*\)$"):
        fit(2)


def test_a_continued_run_without_compilation(folder: Path) -> None:
    def fit(max_epochs: int, module: Any) -> None:
        options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": folder}
        trainer = onecurve.Trainer(**options, max_epochs=max_epochs, seed=0)
        trainer.fit(module, DataLoader(RandomDataset(32, 16), batch_size=8), ckpt_path="last")

    compiled: Any = BoringModel()
    compiled.layer = torch.compile(compiled.layer, backend="eager")
    fit(1, compiled)
    with pytest.raises(UserError, match=r"torch.compile wraps.*`self.net.compile\(\)`"):
        fit(2, BoringModel())
    wider: Any = BoringModel()
    wider.layer = torch.compile(nn.Sequential(nn.Linear(32, 2), nn.Linear(2, 2)), backend="eager")
    with pytest.raises(UserError, match=r"another network than this run's"):
        fit(2, wider)


class Split(BoringModel):
    """Calls layers of its network in a step, and the network in an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        del self.layer
        self.net = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 2))

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net[1](self.net[0](batch)))


class Prunes(Split):
    def __init__(self, takes_all: bool) -> None:
        super().__init__()
        self.takes_all = takes_all

    def on_train_epoch_start(self) -> None:
        if self.takes_all:
            weights = [(layer, "weight") for layer in self.net]
            prune.global_unstructured(weights, pruning_method=prune.L1Unstructured, amount=0.3)
        else:
            prune.l1_unstructured(self.net[0], "weight", amount=0.3)


class PenalizesGradients(Split):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.requires_grad_()
        outputs = self.net(batch)
        (gradient,) = torch.autograd.grad(outputs.sum(), batch, create_graph=True)
        return self.loss(outputs) + gradient.square().mean()


def fit_sharded(folder: Path, module: Any) -> Any:
    """Return the weights of a run without a sanity check, as one that goes on has none."""
    strategy = "fsdp" if "WORLD_SIZE" in os.environ else "auto"
    devices = int(os.environ.get("WORLD_SIZE", 1))
    options: dict[str, Any] = {"accelerator": "cpu", "devices": devices, "strategy": strategy, "max_epochs": 1}
    trainer = onecurve.Trainer(**options, seed=0, num_sanity_val_steps=0, default_root_dir=folder)
    loader = DataLoader(RandomDataset(32, 16), batch_size=8)
    trainer.fit(copy.deepcopy(module), loader, loader)  # the ranks share the memory of what they are sent
    saved = torch.load(folder / "checkpoints" / "last.ckpt")["state_dict"].values()
    return [weight.tolist() for weight in saved]


@pytest.mark.parametrize("takes_all", [False, True])
def test_pruning_of_a_shard(takes_all: bool, pool: Pool, folder: Path) -> None:
    with pytest.raises(RankFailed, match=r"UserError: strategy=fsdp: a hook or the optimizer chooses elements of"):
        pool.run(2, fit_sharded, folder, Prunes(takes_all))


def test_gradients_within_a_step(pool: Pool, folder: Path) -> None:
    with pytest.raises(RankFailed, match=r"UserError: strategy=fsdp: training_step calls torch.autograd.grad, such as"):
        pool.run(2, fit_sharded, folder, PenalizesGradients())


class CopiesLate(Split):
    def on_fit_start(self) -> None:
        copy.deepcopy(self.net)


def test_a_copy_of_a_sharded_network_in_a_hook(pool: Pool, folder: Path) -> None:
    with pytest.raises(RankFailed, match=r"UserError: strategy=fsdp: a hook copies a network, of which"):
        pool.run(2, fit_sharded, folder, CopiesLate())


def test_layers_of_a_sharded_network_may_be_called_before_it(pool: Pool, folder: Path) -> None:
    module = Split()
    one = fit_sharded(folder / "one", module)
    for weights in pool.run(2, fit_sharded, folder / "two", module):
        for weight, expected in zip(weights, one, strict=True):
            assert torch.allclose(torch.tensor(weight), torch.tensor(expected), atol=1e-6)


class Normalizes(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm1d(32), nn.Linear(32, 2))  # type: ignore[assignment]


@pytest.mark.parametrize("bit_exact", [False, True])
def test_a_virtual_rank_of_one_value_cannot_be_normalized(bit_exact: bool, folder: Path) -> None:
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, "virtual_ranks": 8}
    trainer = onecurve.Trainer(**options, bit_exact=bit_exact, max_epochs=1)
    with pytest.raises(UserError, match=r"one value per channel.*: set fewer virtual_ranks, or a larger"):
        trainer.fit(Normalizes(), DataLoader(RandomDataset(32, 16), batch_size=8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_check_interval": 1.5}, "invalid value 1.5 for val_check_interval"),
        ({"precision": "fp16"}, "Precision 'fp16' is invalid"),
        ({"num_nodes": 0}, "`num_nodes` must be a positive integer"),
        (
            {"callbacks": [ModelCheckpoint(every_n_epochs=1), ModelCheckpoint(every_n_epochs=1)]},
            "two callbacks of a class, such as ModelCheckpoint, have the same `monitor`",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_invalid_argument_of_the_trainer_of_a_script(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(UserError, match=message):
        onecurve.Trainer(accelerator="cpu", default_root_dir=folder, **options)
