"""Modules that cannot train as asked end in one line with the option that helps; with it they train the same."""

import importlib
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecurve
from onecurve.errors import UserError
from onecurve.run.experiment import run_experiment
from tests.support.comparison import TOLERANCE, distances
from tests.support.habits import Vectors
from tests.support.pool import Pool, RankFailed
from tests.support.runs import compose, fit, fit_ranks

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false", "report=false"]
OWN += ["trainer.log_every_n_steps=1", "trainer.max_epochs=2", "+data._target_=tests.support.habits.VectorData"]
OWN += ["trainer.precision=64-true"]
TWO = ["strategy=ddp", "trainer.devices=2"]


def of_class(module: type) -> list[str]:
    return [*OWN, f"+module._target_={__name__}.{module.__name__}"]


class OfPytorchLightning(nn.Module):
    """The class from which a module of the other package is derived."""


OfPytorchLightning.__module__ = "pytorch_lightning.core.module"


class Other(OfPytorchLightning):
    pass


def test_a_module_of_pytorch_lightning(folder: Path) -> None:
    with pytest.raises(UserError, match=r"Other is of pytorch_lightning, another package: import lightning as pl; if"):
        run_experiment(compose(folder, *of_class(Other)))


def test_a_module_of_a_library_that_imports_pytorch_lightning(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """What the refusal says of libraries."""
    monkeypatch.setitem(sys.modules, "pytorch_lightning", L.pytorch)
    library: Any = importlib.import_module("pytorch_lightning")
    module = type("Own", (library.LightningModule,), {})()
    onecurve.Trainer(default_root_dir=folder, accelerator="cpu").prepare_module(module)


class Toggling(L.LightningModule):
    """Two networks with an optimizer each, as a GAN has them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.toggle_optimizer(optimizer)
            loss = F.cross_entropy(self.head(self.body(batch[0])), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.log("train/loss", loss.detach(), sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(net.parameters(), 0.1) for net in (self.body, self.head)]


def test_toggled_optimizers(pool: Pool, folder: Path) -> None:
    with pytest.raises(RankFailed, match=r"UserError: a backward pass gives .* \+strategy\.find_unused_parameters=tr"):
        pool.run(2, run_experiment, compose(folder, *of_class(Toggling), *TWO))
    one = fit(compose(folder / "one", *of_class(Toggling)))
    words = [*of_class(Toggling), *TWO, "+strategy.find_unused_parameters=true"]
    for record in fit_ranks(compose(folder / "two", *words), pool):
        assert max(distances(record, one)) < TOLERANCE


class Skipping(Vectors):
    """Leaves out a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def test_a_step_without_a_loss(pool: Pool, folder: Path) -> None:
    run_experiment(compose(folder / "one", *of_class(Skipping)))
    with pytest.raises(
        RankFailed, match=r"UserError: training_step returns None, .* a loss of zero, .*devices=1; .*automatic_optim"
    ):
        pool.run(2, run_experiment, compose(folder, *of_class(Skipping), *TWO))


class OneCycle(Vectors):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer, steps = super().configure_optimizers(), int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ShortCycle(OneCycle):
    def configure_optimizers(self) -> Any:
        optimizer = Vectors.configure_optimizers(self)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def test_a_cycle_that_ends_before_the_run(folder: Path) -> None:
    message = r"make 8 steps of OneCycleLR, which ends after 3: give it total_steps=trainer.estimated_stepping_batches"
    with pytest.raises(UserError, match=message):
        run_experiment(compose(folder, *of_class(ShortCycle)))


def test_an_extended_cycle(folder: Path) -> None:
    words = [*of_class(OneCycle), "callbacks=default", "callbacks.best=null"]
    run_experiment(compose(folder, *words))
    saved, before = f"{folder}/checkpoints/last.ckpt", (folder / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"make 12 steps of OneCycleLR, which ends after 8: .* init_from") as caught:
        run_experiment(compose(folder, *words, "trainer.max_epochs=3", f"ckpt_path={saved}"))
    assert "\n" not in str(caught.value)
    assert (folder / "config.yaml").read_text() == before
    run_experiment(compose(folder / "next", *words, "trainer.max_epochs=3", f"init_from={saved}"))
