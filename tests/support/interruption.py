"""Runs that save a checkpoint in one of Lightning's hooks and then stop."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest

from tests.support.pool import Pool
from tests.support.runs import fit


class Died(Exception):
    """Ends a run before its last step."""


class SaveAndDie(L.Callback):
    """Save a checkpoint in one of Lightning's hooks, then raise."""

    def __init__(self, hook: str, step: int) -> None:
        self.hook, self.step = hook, step

    def _fire(self, hook: str, trainer: L.Trainer) -> None:
        if hook == self.hook and trainer.global_step >= self.step:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "died.ckpt")
            raise Died

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._fire("on_train_batch_end", trainer)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._fire("on_train_batch_start", trainer)

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._fire("on_validation_end", trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._fire("on_train_epoch_end", trainer)


class SaveOnce(L.Callback):
    """Save a checkpoint after one step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")


def die(cfg: Any, hook: str, step: int) -> None:
    """Train until `hook` of a step, save `died.ckpt` in the run folder, and stop."""
    with pytest.raises(Died):
        fit(cfg, SaveAndDie(hook, step))


def run_on_ranks(pool: Pool, devices: int, job: Any, *args: Any) -> list[Any]:
    """Run a job on the ranks of the pool, or in this process for one device; return the result of each rank."""
    return pool.run(devices, job, *args) if devices > 1 else [job(*args)]
