"""Measure what each patch of `src/run/trainer_patches.py` saves per step of a small perceptron.

One process trains with all patches and without one of them in turn. The time is that of the main thread's processor, so
that other work on the machine changes it little.
"""

import argparse
import contextlib
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import hydra
import lightning as L
import torch
from omegaconf import OmegaConf

from src.models.module import Module
from src.run import trainer_patches
from src.run.experiment import assemble
from src.sweeps.resolvers import register_resolvers

ROOT = Path(__file__).parents[3]
OPTIONS = ["data=shapes", "data.source.train_size=6000", "data.source.test_size=100", "data.batch_size=32"]
OPTIONS += ["model=mlp", "model.hidden=[16]", "trainer.max_steps=600", "trainer.max_epochs=null", "test=false"]
OPTIONS += ["trainer.limit_val_batches=0", "trainer.accelerator=cpu", "trainer.devices=1", "logger=none"]
PATCHES = ["remove_profiler_contexts", "cache_logged_results", "skip_empty_hooks", "Module.__setattr__"]


class StepTimer(L.Callback):
    """Collects the processor time of each step after the first hundred, in microseconds."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self._last: float | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        now = time.thread_time()
        if self._last is not None and trainer.global_step > 100:
            self.steps.append(1e6 * (now - self._last))
        self._last = now


def microseconds_per_step(without: str | None, folder: Path) -> float:
    """Return the median time of a step of one run, without one of the patches."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra.compose("train", [*OPTIONS, f"data.root={folder}", f"run_dir={folder}/run"])
    OmegaConf.resolve(cfg)
    with contextlib.ExitStack() as stack:
        if without == "Module.__setattr__":
            stack.enter_context(patch.object(Module, "__setattr__", L.LightningModule.__setattr__))
        elif without:
            stack.enter_context(patch.object(trainer_patches, without, lambda *_: None))
        trainer, module, data = assemble(cfg)
        trainer.callbacks.append(timer := StepTimer())
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            trainer.fit(module, datamodule=data)
    return median(timer.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs with and without each patch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    register_resolvers()
    with tempfile.TemporaryDirectory() as folder:
        for name in PATCHES:
            saved = []
            for _ in range(options.rounds):
                with_patch = microseconds_per_step(None, Path(folder))
                saved.append(microseconds_per_step(name, Path(folder)) - with_patch)
            print(
                f"{name:28} saves {median(saved):4.0f} us ({min(saved):.0f} to {max(saved):.0f}) of {with_patch:.0f} us"
            )


if __name__ == "__main__":
    main()
