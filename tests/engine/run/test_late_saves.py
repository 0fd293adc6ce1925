"""Callbacks of Lightning that save or search: what a ModelCheckpoint has of a step, and what is refused."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor
from torch.utils.data import DataLoader

import onecurve
from onecurve.errors import UserError


class Taught(BoringModel):
    """Learns from a teacher that the hook of a batch moves."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(32, 2).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self(batch) - self.teacher(batch) - 1).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        for mean, weight in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
            mean.data.lerp_(weight.data, 0.5)


class Dies(L.Callback):
    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 4 and trainer.ckpt_path is None:
            raise RuntimeError("died")


def fit(folder: Path, *callbacks: L.Callback, **options: Any) -> dict[str, Tensor]:
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "seed": 0, "callbacks": [*callbacks]}
    given |= {"enable_progress_bar": False, "enable_model_summary": False, **options}
    trainer = onecurve.Trainer(default_root_dir=folder, **given)
    module = Taught()
    trainer.fit(module, DataLoader(RandomDataset(32, 64), batch_size=8), ckpt_path="last")
    assert "on_train_batch_end" not in vars(module)
    return module.state_dict()


@pytest.mark.parametrize("bit_exact", [False, True])
def test_a_saved_step_has_what_the_hook_of_the_module_changes(bit_exact: bool, folder: Path) -> None:
    def saves() -> ModelCheckpoint:
        return ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)

    whole = fit(folder / "whole", saves(), bit_exact=bit_exact)
    with pytest.raises(RuntimeError, match="died"):
        fit(folder / "died", saves(), Dies(), bit_exact=bit_exact)
    resumed = fit(folder / "died", saves(), bit_exact=bit_exact)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())


def test_a_checkpoint_of_an_exception_that_did_not_come(folder: Path) -> None:
    fit(folder, OnExceptionCheckpoint(folder / "none"))
    assert not (folder / "none").exists()


@pytest.mark.parametrize("options", [{"bit_exact": True}, {"strategy": "ddp", "devices": 2}])
def test_a_search_with_the_loss_of_a_part_is_refused(options: dict[str, Any], folder: Path) -> None:
    with pytest.raises(UserError, match="LearningRateFinder follows the loss of rank zero's samples"):
        fit(folder, LearningRateFinder(), **options)
