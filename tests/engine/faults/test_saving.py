"""Intervals at which the latest state is saved."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import lightning as L
import pytest
import torch
import torch.distributed as dist

from tests.support.commands import PARITY, TWO
from tests.support.pool import Pool
from tests.support.runs import compose, fit


class Saves(L.Callback):
    """Record the steps at which a checkpoint is saved, and count those begun."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.begun = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.begun += 1

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.steps.append(trainer.global_step)


class MissingRows(L.Callback):
    """Record the steps whose checkpoint is written before their row of metrics.csv."""

    def __init__(self, folder: Path) -> None:
        self.file, self.missing = folder / "metrics.csv", list[int]()

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        lines = self.file.read_text().splitlines()[1:] if self.file.exists() else []
        if not lines or int(lines[-1].split(",")[0]) != trainer.global_step - 1:
            self.missing.append(trainer.global_step)


def saved_at(cfg: Any) -> list[int]:
    saves = Saves()
    fit(cfg, saves)
    return saves.steps


def test_saves_by_steps_and_at_the_end_of_each_epoch(small: list[str], folder: Path) -> None:
    mlp = ["model=mlp", "~model.width", "model.hidden=[16]"]
    only = [*PARITY, *mlp, "callbacks.best=null", "trainer.max_epochs=2", "trainer.max_steps=-1"]
    every = "callbacks.checkpoint.every_n_train_steps"
    assert saved_at(compose(folder / "a", *small, *only, f"{every}=4")) == [4, 8, 11, 12, 16, 20, 22]
    assert saved_at(compose(folder / "b", *small, *only, f"{every}=11")) == [11, 22]
    halves = "trainer.accumulate_grad_batches=2"
    assert saved_at(compose(folder / "c", *small, *only, f"{every}=5", halves)) == [5, 10, 11, 15, 20, 22]
    rows = MissingRows(folder / "d")
    fit(compose(folder / "d", *small, *only, f"{every}=1"), rows)
    assert rows.missing == [], "the row of a step is on disk before its checkpoint"
    assert torch.load(folder / "c" / "checkpoints" / "previous.ckpt")["global_step"] == 20


@pytest.mark.parametrize(
    ("every", "end", "expected"),
    [
        ("2", ["trainer.max_epochs=3", "trainer.max_steps=-1"], [22, 33]),
        ("null", ["trainer.max_epochs=3", "trainer.max_steps=15"], [15]),
        ("null", ["callbacks=[default,early_stopping]", "optimizer.lr=0", "trainer.max_epochs=20"], [22]),
    ],
)
def test_saves_by_epochs_and_at_the_end(
    every: str, end: list[str], expected: list[int], small: list[str], folder: Path
) -> None:
    mlp = ["model=mlp", "~model.width", "model.hidden=[16]", "callbacks.best=null", "trainer.max_steps=-1"]
    stop = ["callbacks.early_stopping.patience=1"] if "early" in end[0] else []
    cfg = compose(folder, *small, *PARITY, *mlp, *end, *stop, f"callbacks.checkpoint.every_n_epochs={every}")
    assert saved_at(cfg) == expected


def test_saves_by_time(pool: Pool, small: list[str], folder: Path) -> None:
    """Two ranks save together although their clocks differ."""
    task = [*PARITY, "callbacks.best=null", "callbacks.checkpoint.train_time_interval=60"]
    first, second = pool.run(2, saved_at_by_own_clock, compose(folder, *small, *task, *TWO))
    assert first == second
    by_time = [step for step in first if step not in (11, 20)]
    assert 1 <= len(by_time) <= 6


def saved_at_by_own_clock(cfg: Any) -> list[int]:
    """Return the steps at which this rank saves, by a clock that advances 16 seconds a step, or 23 on rank one."""
    saves, clock = Saves(), Mock()
    clock.monotonic.side_effect = lambda: (16 + 7 * dist.get_rank()) * saves.begun
    with patch("onecurve.run.saving.time", clock):
        fit(cfg, saves)
    return saves.steps
