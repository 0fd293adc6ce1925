"""The runs that the pictures show, each in its own processes, with one thread per process."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from src.report.run_folder import RunFolder
from src.strategies.pipeline.schedules import SCHEDULES

ROOT = Path(__file__).parents[3]
RANKS, MICROBATCHES = 4, 8  # of the pictured schedules
_COMMON = ["trainer.accelerator=cpu", "trainer.limit_val_batches=0", "test=false", "report=false", "logger=none"]
_COMMON += ["callbacks.best=null", "callbacks.checkpoint=null", "callbacks.progress_bar=null"]
# The parity experiment, but its 90 images are learned by heart, so that the loss falls within 60 steps.
_CURVES = ["experiment=parity", "data.source.train_size=100", "data.source.test_size=40", "data.augment.cutout=0"]
_CURVES += ["data.augment.crop_padding=0", "data.augment.flip=false", "model.width=8", "optimizer.lr=0.05"]
_CURVES += ["trainer.max_steps=60", "trainer.max_epochs=30"]
_SPEED = ["data=shapes", "data.source.train_size=4000", "data.source.test_size=40", "data.batch_size=128"]
_SPEED += ["model=mlp", "model.hidden=[2048,2048,2048,2048]", "optimizer=adamw"]
_SPEED += ["trainer.max_steps=48", "trainer.log_every_n_steps=2"]
_SCHEDULES = ["data=shapes", "data.source.train_size=1000", "data.source.test_size=40", "data.batch_size=64"]
_SCHEDULES += ["model=vit", "model.depth=8", "optimizer=adamw", "strategy=pipeline"]
_SCHEDULES += [f"trainer.devices={RANKS}", f"strategy.microbatches={MICROBATCHES}"]
_SCHEDULES += ["trainer.max_steps=20", "trainer.log_every_n_steps=1"]


class Run(NamedTuple):
    """A run: the name in its picture, its folder below those of all runs, and the options of `train.py`."""

    name: str
    folder: str
    options: list[str]


def _strategies(kind: str, options: list[str]) -> list[Run]:
    """Return a run of each strategy."""
    runs = []
    for strategy, devices in (("auto", 1), ("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("pipeline", 2), ("hybrid", 4)):
        name = "single process" if strategy == "auto" else f"{strategy} × {devices}"
        settings = [*options, f"strategy={strategy}", f"trainer.devices={devices}"]
        runs.append(Run(name, f"{kind}/{strategy}", settings))
    return runs


CURVES = _strategies("curves", _CURVES)
_BROKEN = [*_CURVES, "strategy=ddp", "trainer.devices=2", "trainer.sync_batchnorm=false"]
CURVES.append(Run("ddp × 2, sync_batchnorm=false", "curves/ddp_local_batchnorm", _BROKEN))
SPEEDS = _strategies("speed", _SPEED)
PIPELINES = [
    Run(schedule, f"schedules/{schedule}", [*_SCHEDULES, f"strategy.schedule={schedule}"]) for schedule in SCHEDULES
]


def train(run: Run, runs: Path) -> RunFolder:
    """Train a run below the folder `runs`, unless it has finished there before; return what it has recorded.

    Raises:
        subprocess.CalledProcessError: if the run fails; its output is printed.
    """
    folder = RunFolder(runs / run.folder)
    if folder.status == "finished":
        return folder
    shutil.rmtree(folder.path, ignore_errors=True)  # what an interrupted run has left
    command = [sys.executable, "train.py", *run.options, *_COMMON, f"run_dir={folder.path}"]
    print(" ".join(command[1:]), flush=True)
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if result.returncode:
        print(result.stdout, result.stderr, file=sys.stderr)
    result.check_returncode()
    return RunFolder(folder.path)
