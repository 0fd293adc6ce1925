"""The runs that the pictures show, each in its own processes, with one thread per process."""

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from engine.dev.shared.process import python, run_limited
from onecurve.extras.report.run_folder import RunFolder
from onecurve.parallel.pipeline.schedules import SCHEDULES

RANKS, MICROBATCHES = 4, 8  # of the pictured schedules
_COMMON = ["trainer.accelerator=cpu", "trainer.limit_val_batches=0", "test=false", "report=false", "logger=none"]
_COMMON += ["callbacks.best=null", "callbacks.checkpoint=null", "callbacks.progress_bar=null"]
# The parity experiment, but its 90 images are learned by heart, so that the loss falls within 60 steps.
_CURVES = ["experiment=parity", "data.source.train_size=100", "data.source.test_size=40", "data.augment.cutout=0"]
_CURVES += ["data.augment.crop_padding=0", "data.augment.flip=false", "model.width=8", "optimizer.lr=0.05"]
_CURVES += ["trainer.max_steps=60", "trainer.max_epochs=30"]
_SCHEDULES = ["data=shapes", "data.source.train_size=1000", "data.source.test_size=40", "data.batch_size=64"]
_SCHEDULES += ["model=vit", "model.depth=8", "optimizer=adamw", "strategy=pipeline"]
_SCHEDULES += [f"trainer.devices={RANKS}", f"strategy.microbatches={MICROBATCHES}"]
_SCHEDULES += ["trainer.max_steps=20", "trainer.log_every_n_steps=1"]


class Run(NamedTuple):
    """A run: the name in its picture, its folder below those of all runs, and the options of `train.py`."""

    name: str
    folder: str
    options: list[str]


CURVES = []
for _strategy, _devices in (("auto", 1), ("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("pipeline", 2), ("hybrid", 4)):
    _name = "single process" if _strategy == "auto" else f"{_strategy} × {_devices}"
    _settings = [*_CURVES, f"strategy={_strategy}", f"trainer.devices={_devices}"]
    CURVES.append(Run(_name, f"curves/{_strategy}", _settings))
_BROKEN = [*_CURVES, "strategy=ddp", "trainer.devices=2", "trainer.sync_batchnorm=false"]
CURVES.append(Run("ddp × 2, sync_batchnorm=false", "curves/ddp_local_batchnorm", _BROKEN))
# The same in float32, once with virtual ranks together and once one by one. FSDP keeps filters contiguous.
TOGETHER, ONE_BY_ONE = list[Run](), list[Run]()
for _strategy, _devices in (("auto", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 2), ("pipeline", 2), ("hybrid", 4)):
    _name = "single process" if _strategy == "auto" else f"{_strategy} × {_devices}"
    _settings = [*_CURVES, f"strategy={_strategy}", f"trainer.devices={_devices}"]
    _settings += ["trainer.precision=32-true", "module.channels_last=false"]
    TOGETHER.append(Run(_name, f"bits/together_{_strategy}_{_devices}", _settings))
    ONE_BY_ONE.append(Run(_name, f"bits/one_by_one_{_strategy}_{_devices}", [*_settings, "bit_exact=true"]))
PIPELINES = [
    Run(schedule, f"schedules/{schedule}", [*_SCHEDULES, f"strategy.schedule={schedule}"]) for schedule in SCHEDULES
]


def train(run: Run, runs: Path) -> RunFolder:
    """Train a run below the folder `runs`, unless it has finished there before; return what it has recorded.

    Raises:
        SystemExit: if the run fails.
    """
    folder = RunFolder(runs / run.folder)
    if folder.status == "finished":
        return folder
    shutil.rmtree(folder.path, ignore_errors=True)  # what an interrupted run has left
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    command, log = python("train.py", *run.options, *_COMMON, f"run_dir={folder.path}"), folder.path.with_suffix(".log")
    print(" ".join(command[1:]), flush=True)
    if code := run_limited(command, log):
        sys.exit(f"error: {run.name} ended with {code}:\n{log.read_text()}")
    return RunFolder(folder.path)
