"""Compare plans with runs on this machine: the seconds of a step, and which strategy is the fastest.

Four processes share fewer cores. Their networks sleep instead of computing, which any number of processes can do at
the same time. A figure is the least of all rounds and log points, which other programs disturb least.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.dev.shared.process import ROOT
from onecurve.extras.plan.hardware import Hardware, this_machine

_SLEEPING = ["model=mlp", "model._target_=engine.dev.plan_check.sleeping"]
_SLEEPING += ["hardware._target_=engine.dev.plan_check.four_devices", "data.batch_size=64"]
# By number of processes: the settings of each case, and the strategies.
_CASES = {
    1: [["model=resnet9"], ["model=vit", "data.batch_size=32"]],
    2: [
        ["model=resnet9"],
        ["model=resnet9", "data.batch_size=512"],
        ["model=resnet18", "data.batch_size=32"],
        ["model=vit", "data.batch_size=32"],
        ["model=vit", "model.depth=4"],
        ["model=vgg16", "data.batch_size=64"],
        ["model=airbench"],
        ["model=mlp", "model.hidden=[1024,1024,1024]"],
    ],
    4: [[*_SLEEPING, f"model.hidden=[{width},{width},{width}]"] for width in (256, 1500, 3000)],
}
_PIPELINES = [[f"strategy.schedule={schedule}", "strategy.microbatches=4"] for schedule in ("1f1b", "gpipe")]
_ZERO_BUBBLE = ["strategy=pipeline", "strategy.schedule=zbv_zero_bubble", "strategy.microbatches=4"]
_DATA_PARALLEL = [["strategy=auto"], ["strategy=ddp", "strategy.shard_optimizer=true"], ["strategy=fsdp"]]
_STRATEGIES = {
    1: [["strategy=auto"]],
    2: [*_DATA_PARALLEL, *(["strategy=pipeline", *words] for words in _PIPELINES), _ZERO_BUBBLE],
    4: [
        *_DATA_PARALLEL,
        ["strategy=hsdp", "strategy.replicas=2"],
        *(["strategy=hybrid", "strategy.stages=2", *words] for words in _PIPELINES),
        *(["strategy=pipeline", *words] for words in _PIPELINES),
    ],
}
_RUN = [
    "data=shapes",
    "logger=none",
    "report=false",
    "test=false",
    "trainer.limit_val_batches=0",
    "callbacks.best=null",
]
_RUN += ["trainer.log_every_n_steps=20", "trainer.enable_progress_bar=false"]


class _Sleep(torch.autograd.Function):
    """The identity, which takes a time for each sample, and twice that in the backward pass."""

    SECONDS = 3e-4

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(_Sleep.SECONDS * len(inputs))
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * _Sleep.SECONDS * len(gradient))
        return gradient


class _SleepingBlock(nn.Module):
    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, units)

    def forward(self, inputs: Tensor) -> Tensor:
        return _Sleep.apply(self.linear(inputs.flatten(1)))


def sleeping(num_classes: int, image_shape: list[int], hidden: list[int]) -> nn.Sequential:
    """Return a network whose layers sleep; their widths decide how much is communicated."""
    widths = [torch.Size(image_shape).numel(), *hidden, num_classes]
    return nn.Sequential(*(_SleepingBlock(width, units) for width, units in pairwise(widths)))


def four_devices(price_per_hour: float | None = None) -> Hardware:
    """Return the hardware of this machine, on which four processes sleep as fast as one."""
    hardware = this_machine(price_per_hour)
    hardware.devices_per_node = 4
    return hardware


def planned(processes: int, settings: list[str]) -> dict[str, float]:
    """Return the planned milliseconds of a step by strategy."""
    with tempfile.TemporaryDirectory() as folder:
        _train(folder, processes, ["plan=true", *settings])
        rows = json.loads(Path(folder, "plan.json").read_text())["candidates"]
    return {" ".join(row["options"]): row["step_ms"] for row in rows}


def measured(processes: int, settings: list[str]) -> float:
    """Return the least milliseconds of a step between two log points."""
    with tempfile.TemporaryDirectory() as folder:
        _train(folder, processes, settings)
        with Path(folder, "metrics.csv").open(newline="") as file:
            rows = [row.get("throughput/step_ms") for row in csv.DictReader(file)]
    return min(float(milliseconds) for milliseconds in rows if milliseconds)


def _train(folder: str, processes: int, words: list[str]) -> None:
    command = [sys.executable, "train.py", *_RUN, f"trainer.devices={processes}", f"run_dir={folder}", *words]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def compare(processes: int, settings: list[str], rounds: int, steps: int) -> bool:
    """Print a row for each strategy; return whether the one that the plan names is the fastest, within 5 %."""
    plans: dict[str, float] = {}
    runs: dict[str, float] = {}
    for _ in range(rounds):
        for name, milliseconds in planned(processes, settings).items():
            plans[name] = min(milliseconds, plans.get(name, milliseconds))
        for words in _STRATEGIES[processes]:
            name = " ".join(words)
            if name in plans:
                milliseconds = measured(processes, [*settings, *words, f"trainer.max_steps={steps}"])
                runs[name] = min(milliseconds, runs.get(name, milliseconds))
    title = " ".join(word.removeprefix("model=") for word in settings if "_target_" not in word)
    for name, milliseconds in runs.items():
        strategy = name.replace("strategy=", "").replace("strategy.", "")
        cells = (title, processes, strategy, f"{plans[name]:.1f}", f"{milliseconds:.1f}")
        print("|", *(f"{cell} |" for cell in cells), f"{plans[name] / milliseconds:.2f} |", flush=True)
    # As strategy=best, which keeps `auto` unless another one is clearly faster.
    named = min(runs, key=lambda name: plans[name] * (0.95 if name == "strategy=auto" else 1))
    return runs[named] <= 1.05 * min(runs.values())


def main() -> None:
    """Print a row for each network, number of processes and strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--only", default="", help="only networks with this name")
    parser.add_argument("--processes", type=int, nargs="*", default=[*_CASES])
    options = parser.parse_args()
    print("| network | processes | strategy | planned ms | run ms | ratio |\n| --- | --- | --- | --- | --- | --- |")
    named = []
    for processes in options.processes:
        for settings in _CASES[processes]:
            if f"model={options.only}" in settings[0]:
                is_named = compare(processes, settings, options.rounds, options.steps)
                named += [is_named] if processes > 1 else []
    print(f"\nThe fastest strategy is named in {sum(named)} of {len(named)} cases.")


if __name__ == "__main__":
    main()
