"""Measure what `callbacks.timeline` costs per step, and which fraction of a step of two networks that is.

One process trains a small perceptron; a clock runs while Lightning calls a hook of the callback. The clock is the main
thread's processor time, so that other work on the machine changes it little. Lightning's own time to call a hook is
measured apart, and so are the marks around a collective, of which one process has none. A run of the default network
gives the duration of a usual step.
"""

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import hydra
import lightning as L
import torch
from lightning.pytorch.trainer import call
from omegaconf import OmegaConf

from src.callbacks.timeline import Timeline
from src.run.experiment import assemble
from src.sweeps.resolvers import register_resolvers
from src.utils.timeline import StepRecording, communication, set_recording

ROOT = Path(__file__).parents[3]
OPTIONS = ["data=shapes", "data.source.train_size=6000", "data.source.test_size=100", "data.batch_size=32"]
OPTIONS += ["model=mlp", "model.hidden=[16]", "trainer.max_steps=600", "trainer.max_epochs=null", "test=false"]
OPTIONS += ["trainer.limit_val_batches=0", "trainer.accelerator=cpu", "trainer.devices=1", "logger=none"]
COMMON = [word for word in OPTIONS if not word.startswith("model")]
DEFAULT_NETWORK = [*COMMON, "model=resnet9", "data.batch_size=128", "trainer.max_steps=130"]
HOOKS = [name for name in vars(Timeline) if name.startswith("on_")]
CALLS = 10_000


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


class Clock:
    """Adds up the processor time of functions."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.thread_time()
            result = function(*args)
            self.seconds += time.thread_time() - start
            return result

        return timed


def train(folder: Path, overrides: list[str]) -> tuple[float, float]:
    """Return microseconds per step: those of the callback, and those of the median step."""
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = hydra.compose("train", [*overrides, f"data.root={folder}", f"run_dir={folder}/run"])
    OmegaConf.resolve(cfg)
    clock, timer = Clock(), StepTimer()
    with contextlib.ExitStack() as stack:
        for name in HOOKS:
            stack.enter_context(patch.object(Timeline, name, clock.around(getattr(Timeline, name))))
        trainer, module, data = assemble(cfg)
        trainer.callbacks.append(timer)
        stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
        trainer.fit(module, datamodule=data)
    return 1e6 * clock.seconds / trainer.global_step, median(timer.steps)


def microseconds_per_call(function: Callable[[], Any]) -> float:
    start = time.thread_time()
    for _ in range(CALLS):
        function()
    return 1e6 * (time.thread_time() - start) / CALLS


def hook_call() -> float:
    """Return the microseconds that Lightning takes to call a hook of one callback."""

    class Empty(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None: ...

    trainer = L.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    trainer.strategy._lightning_module = L.LightningModule()

    def run_hooks() -> None:
        call._call_callback_hooks(trainer, "on_train_batch_end", None, None, 0)

    trainer.callbacks = []
    without = microseconds_per_call(run_hooks)
    trainer.callbacks = [Empty()]
    return microseconds_per_call(run_hooks) - without


def collective_marks(recording: StepRecording | None) -> float:
    """Return the microseconds of the two marks around a collective, in a step that is recorded or not."""

    def mark() -> None:
        with communication():
            pass

    set_recording(recording)
    cost = microseconds_per_call(mark)
    set_recording(None)
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="runs of the perceptron")
    options = parser.parse_args()
    torch.set_num_threads(1)
    register_resolvers()
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(Path(folder), OPTIONS) for _ in range(options.rounds)]
        hooks, call_of_hook = median(cost for cost, _ in runs), hook_call()
        cost = hooks + call_of_hook
        spread = f"{min(runs)[0]:.1f} to {max(runs)[0]:.1f}"
        print(f"per step: {hooks:.1f} us in the hooks ({spread}), and {call_of_hook:.1f} us to call one")
        recorded = collective_marks(StepRecording(torch.device("cpu"), "data"))
        print(f"per collective: {recorded:.1f} us in the recorded step, {collective_marks(None):.1f} us in the others")
        _, default_step = train(Path(folder), DEFAULT_NETWORK)
        for name, step in {"perceptron": median(step for _, step in runs), "default network": default_step}.items():
            print(f"{name}: {cost / step:.2%} of a step of {step / 1000:.1f} ms")


if __name__ == "__main__":
    main()
