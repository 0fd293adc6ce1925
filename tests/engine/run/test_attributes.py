"""What training changes in attributes of a module is as before in a resumed run."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric

import onecurve
from tests.support.comparison import TOLERANCE, relative
from tests.support.interruption import die, run_on_ranks
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
OWN += ["trainer.log_every_n_steps=1", "trainer.max_epochs=3", "+data._target_=tests.support.habits.VectorData"]
OWN += [f"+module._target_={__name__}.Anneals", "trainer.precision=64-true"]
OWN += [f"+callbacks.beta._target_={__name__}.Beta"]
HARDWARE = {"one": [], "ddp": ["strategy=ddp"], "fsdp": ["strategy=fsdp", "strategy.sharded_checkpoints=true"]}
PLACES = {  # in three epochs of four steps
    "middle of an epoch": ("on_train_batch_start", 6),
    "end of the first epoch": ("on_train_epoch_end", 4),
    "end of an epoch": ("on_train_epoch_end", 8),
    "start of an epoch": ("on_train_batch_start", 8),
}


class Anneals(L.LightningModule):
    """A loss that depends on counts, a running mean and a tensor, and on nothing of the process."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.net = nn.Linear(16, 3)
        self.steps = self.epochs = self.steps_of_epoch = 0
        self.mean, self.scale, self.rank, self.beta = 0.0, scale, 0, 0.0
        self.identity = torch.eye(3).to_sparse()

    def on_fit_start(self) -> None:
        self.rank = self.global_rank

    def on_train_epoch_start(self) -> None:
        self.epochs, self.steps_of_epoch = self.epochs + 1, 0
        self.seed = 10 * self.epochs + self.global_rank

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.rank == self.seed % 10 == self.global_rank
        self.outputs = self.net(batch[0])  # with a gradient: torch.save would keep its graph
        if not hasattr(self, "center"):
            self.center = torch.zeros(3, dtype=torch.float64)
        weight = self.scale / (1 + self.steps + self.epochs + self.steps_of_epoch + self.mean)
        self.log("train_loss", F.cross_entropy(self.outputs, batch[1]), sync_dist=True)
        return weight * F.cross_entropy(self.outputs + self.center, batch[1]) + self.beta * self.outputs.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps, self.steps_of_epoch = self.steps + 1, self.steps_of_epoch + 1
        self.mean = 0.9 * self.mean + np.float64(0.1) * self.epochs
        self.center = self.center + torch.tensor([0.1, 0.0, -0.1]) * self.steps

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


class Beta(L.Callback):
    """A factor of the loss by a count that the callback keeps."""

    count = 0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.count += 1
        pl_module.beta = self.count / 10


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Record:
    return fit(compose(tmp_path_factory.mktemp("whole"), *OWN))


ROWS = [
    # One process has each place, and one place shows that each rank restores its own.
    pytest.param(hardware, place, marks=pytest.mark.slow if hardware != "one" and number else [])
    for hardware in HARDWARE
    for number, place in enumerate(PLACES)
]


@pytest.mark.parametrize(("hardware", "place"), ROWS)
def test_resumed_and_undisturbed_runs_agree(hardware: str, place: str, whole: Record, pool: Pool, folder: Path) -> None:
    words, devices = [*OWN, *HARDWARE[hardware]], 2 if hardware != "one" else 1
    words.append(f"trainer.devices={devices}")
    run_on_ranks(pool, devices, die, compose(folder / "run", *words), *PLACES[place])
    resumed = compose(folder / "run", *words, f"ckpt_path={folder}/run/died.ckpt")
    for record in run_on_ranks(pool, devices, fit, resumed):
        assert all(relative(record.final[name], value) < TOLERANCE for name, value in whole.final.items())


class Scaled(nn.Linear):
    """A layer with a factor, which a hook of the module changes."""

    factor = 1.0


class Stages(L.LightningModule):
    """Counts in an attribute of each layer, which a pipeline divides into stages."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Scaled(16, 16), nn.ReLU(), Scaled(16, 3))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for layer in self.net.modules():
            if isinstance(layer, Scaled):
                layer.factor = layer.factor + 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.5)


class Bar(TQDMProgressBar):
    """A user's progress bar, whose numbers are those of its process."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.drawn = 1 + getattr(self, "drawn", 0)
        super().on_train_batch_start(*args)


def test_a_checkpoint_has_the_attributes_of_all_stages(pool: Pool, folder: Path) -> None:
    words = [word for word in OWN if "_target_=" + __name__ not in word]
    words += [f"+module._target_={__name__}.Stages", "strategy=pipeline", "trainer.devices=2"]
    run_on_ranks(pool, 2, die, compose(folder, *words), "on_train_batch_start", 6)
    saved = torch.load(folder / "died.ckpt")["attributes"]
    assert saved == {"net.0.factor": 7.0, "net.2.factor": 7.0}


def test_numbers_of_a_progress_bar_are_not_saved(folder: Path) -> None:
    die(compose(folder, *OWN, f"+callbacks.bar._target_={__name__}.Bar"), "on_train_batch_start", 6)
    assert not [name for name in torch.load(folder / "died.ckpt")["attributes"] if "Bar" in name]


def test_last_checkpoint_is_saved_before_callbacks_begin_the_next_step(folder: Path) -> None:
    whole = fit(compose(folder / "whole", *OWN))
    last = f"{{_target_: onecurve.run.saving.LastCheckpoint, dirpath: {folder}/saved, every_n_train_steps: 6}}"
    die(compose(folder / "run", *OWN, f"+callbacks.last={last}"), "on_train_batch_start", 7)
    resumed = fit(compose(folder / "run", *OWN, f"ckpt_path={folder}/saved/last.ckpt"))
    assert all(relative(resumed.final[name], value) < TOLERANCE for name, value in whole.final.items())


class Thresholds(BoringModel):
    """A threshold that training moves, by which a test decides, and a metric that it updates."""

    threshold = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.largest = MaxMetric()

    def on_train_batch_end(self, *_: Any) -> None:
        self.threshold += 0.1
        self.largest.update(self.threshold)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("share", (self(batch) > self.threshold).double().mean())

    def on_test_epoch_end(self) -> None:
        self.log("largest", self.largest.compute())


@pytest.mark.parametrize("bit_exact", [False, True])
def test_a_run_that_has_ended_is_tested_with_the_attributes_and_metrics_of_its_end(
    bit_exact: bool, folder: Path
) -> None:
    shares = []
    for _ in range(2):
        trainer = onecurve.Trainer(
            default_root_dir=folder, max_epochs=1, accelerator="cpu", devices=1, bit_exact=bit_exact
        )
        module, loader = Thresholds(), DataLoader(RandomDataset(32, 64), batch_size=8)
        trainer.fit(module, loader, ckpt_path="last")
        assert module.threshold == pytest.approx(0.8)
        shares += trainer.test(module, loader)
    assert shares[0] == shares[1]


def test_a_checkpoint_has_what_training_changes(folder: Path) -> None:
    die(compose(folder, *OWN), "on_train_batch_start", 6)
    saved = torch.load(folder / "died.ckpt")["attributes"]
    assert saved.keys() == {
        "steps",
        "epochs",
        "steps_of_epoch",
        "seed",
        "mean",
        "center",
        "beta",
        "callback Beta.count",
    }
    assert (saved["steps"], saved["epochs"], saved["steps_of_epoch"]) == (6, 2, 2)
