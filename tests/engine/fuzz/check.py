"""Run a case, and compare all its results with those of the uninterrupted run."""

import csv
import shutil
import signal
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from src.engine.config.folder import newest_checkpoint
from src.engine.run.experiment import run
from src.engine.state.integrity import read_checkpoint
from src.engine.utils import signals
from tests.engine.fuzz.cases import Case
from tests.support.comparison import TOLERANCE, check_same_rows, relative
from tests.support.experiments import SHORT
from tests.support.interruption import Died, SaveAndDie, run_on_ranks
from tests.support.pool import Pool
from tests.support.runs import compose, moments

BASE = ["experiment=parity", *SHORT, "trainer.max_steps=-1"]


class Stop(SaveAndDie):
    """End the run without a save in one of Lightning's hooks, or by a signal to the last rank, from a step on."""

    def _fire(self, hook: str, trainer: L.Trainer) -> None:
        if trainer.global_step < self.step or trainer.sanity_checking or trainer.testing:
            return
        if self.hook == "signal" and trainer.global_rank == trainer.world_size - 1 and not signals.requested():
            signals.on_signal(signal.SIGTERM, None)
        elif self.hook == hook:
            raise Died


class Checker:
    """Checks cases, with the images that all of them predict."""

    def __init__(self, pool: Pool, small: list[str], folder: Path) -> None:
        self.pool, self.small, self.folder = pool, small, folder
        self.images = folder / "images"
        self.images.mkdir()
        for number, image in enumerate(np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)):
            Image.fromarray(image).save(self.images / f"{number}.png")

    def check(self, case: Case) -> None:
        """Check one case.

        Raises:
            AssertionError: if the case's run differs from the uninterrupted one.
        """
        alone, moved = self.folder / "alone", self.folder / "moved"
        for folder in (alone, moved):
            shutil.rmtree(folder, ignore_errors=True)
        self._start(case, "auto x1", alone)
        for place, stop in zip(case.places, [*case.stops, None], strict=True):
            self._start(case, place, moved, stop)
        check_same_rows(moved, alone)
        _check_same_checkpoints(moved / "checkpoints", alone / "checkpoints")
        _check_same_predictions(moved, alone)

    def _start(self, case: Case, place: str, folder: Path, stop: tuple[str, int] | None = None) -> None:
        overrides = [*self.small, *BASE, *case.overrides(place), f"predict={self.images}"]
        if stop:
            node = f"_target_: tests.engine.fuzz.check.Stop, hook: {stop[0]}, step: {stop[1]}"
            overrides.append(f"+callbacks.stop={{{node}}}")
        if newest := newest_checkpoint(folder):
            overrides.append(f"ckpt_path='{newest}'")
        cfg = compose(folder, *overrides)
        run_on_ranks(self.pool, cfg.trainer.devices, _run_until_stopped, cfg)


def _run_until_stopped(cfg: Any) -> None:
    try:
        run(cfg)
    except (Died, signals.Stopped):
        pass
    finally:
        signals._received.clear()


def _check_same_predictions(folder: Path, other: Path) -> None:
    ours, theirs = ((place / "predictions.csv").read_text().splitlines() for place in (folder, other))
    rows, expected = ([list(map(_parsed, row)) for row in csv.reader(lines)] for lines in (ours, theirs))
    _check_same(rows, expected, "predictions.csv")


def _parsed(cell: str) -> Any:
    return float(cell) if cell.replace(".", "", 1).replace("e-", "", 1).isdigit() else cell


def _check_same_checkpoints(folder: Path, other: Path) -> None:
    """Compare all checkpoints but `previous.ckpt`, which depends on the stops."""
    names, expected = ({file.name for file in place.glob("*.ckpt")} - {"previous.ckpt"} for place in (folder, other))
    assert names == expected
    for name in names:
        ours, theirs = (_comparable(place / name) for place in (folder, other))
        _check_same(ours, theirs, name)


def _comparable(file: Path) -> dict[str, Any]:
    """Return the parts of a checkpoint that do not depend on strategy and stops."""
    checkpoint = read_checkpoint(file)
    kept = ("epoch", "global_step", "state_dict", "training_state_dict", "position")
    speed = ("throughput/", "ranks/")
    metrics = {name: value for name, value in checkpoint["metrics"].items() if not name.startswith(speed)}
    states = {
        name: state for name, state in checkpoint["callbacks"].items() if not name.startswith(("Last", "Through"))
    }
    common = {name: checkpoint.get(name) for name in kept} | {"metrics": metrics, "callbacks": states}
    common["steps of the schedules"] = [state["last_epoch"] for state in checkpoint["lr_schedulers"]]
    return common | {"moments": [moments(state) for state in checkpoint["optimizer_states"]]}


def _check_same(ours: Any, theirs: Any, where: str) -> None:
    """Compare two nested values: tensors and floats to the tolerance, paths by name, the rest exactly."""
    if isinstance(theirs, dict):
        ours, theirs = ({_short(key): value for key, value in each.items()} for each in (ours, theirs))
        assert ours.keys() == theirs.keys(), where
        for name, value in theirs.items():
            _check_same(ours[name], value, f"{where}: {name}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for position, value in enumerate(theirs):
            _check_same(ours[position], value, f"{where}: {position}")
    elif isinstance(theirs, Tensor) and theirs.is_floating_point() and theirs.isfinite().all():
        assert relative(torch.as_tensor(ours), theirs) < 10 * TOLERANCE, where
    elif isinstance(theirs, Tensor):
        assert torch.equal(torch.as_tensor(ours), theirs), where
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=TOLERANCE, nan_ok=True), where
    else:
        assert _short(ours) == _short(theirs), where


def _short(value: Any) -> Any:
    """Return the name of a path, and any other value as it is."""
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value
