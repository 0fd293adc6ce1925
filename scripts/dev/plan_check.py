"""Compare plans with runs on this machine: the seconds of a step, and which strategy is the fastest.

Plan and run take turns. A figure is the least of all rounds, which other programs disturb least.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.dev.shared.process import ROOT

_MODELS = {"resnet9": [], "vit": ["data.batch_size=32"], "resnet18": ["data.batch_size=32"]}
_STRATEGIES = {
    1: [["strategy=auto"]],
    2: [
        ["strategy=ddp"],
        ["strategy=ddp", "strategy.shard_optimizer=true"],
        ["strategy=fsdp"],
        ["strategy=pipeline", "strategy.schedule=1f1b", "strategy.microbatches=4"],
        ["strategy=pipeline", "strategy.schedule=gpipe", "strategy.microbatches=4"],
        ["strategy=pipeline", "strategy.schedule=zbv_zero_bubble", "strategy.microbatches=4"],
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
_RUN += ["trainer.max_steps=40", "trainer.log_every_n_steps=10", "trainer.enable_progress_bar=false"]


def planned(folder: Path, devices: int, options: list[str], settings: list[str]) -> float:
    """Return the planned milliseconds of a step."""
    _train(folder, "plan=true", f"trainer.devices={devices}", *options, *settings)
    rows = json.loads((folder / "plan.json").read_text())
    return next(row["step_ms"] for row in rows if row["options"] == options)


def measured(folder: Path, devices: int, options: list[str], settings: list[str]) -> float:
    """Return the least milliseconds of a step between two log points."""
    _train(folder, f"trainer.devices={devices}", *options, *settings)
    with (folder / "metrics.csv").open(newline="") as file:
        return min(float(row["throughput/step_ms"]) for row in csv.DictReader(file) if row.get("throughput/step_ms"))


def _train(folder: Path, *words: str) -> None:
    command = [sys.executable, "train.py", *_RUN, f"run_dir={folder}", *words]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def main() -> None:
    """Print a row for each model, number of processes and strategy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only this model")
    options = parser.parse_args()
    print("| model | processes | strategy | planned ms | run ms | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for model, settings in _MODELS.items():
        for devices, strategies in _STRATEGIES.items() if options.only in model else ():
            for words in strategies:
                task = (devices, words, [f"model={model}", *settings])
                times = []
                for _ in range(options.rounds):
                    with tempfile.TemporaryDirectory() as folder:
                        plan = planned(Path(folder, "plan"), *task)
                        times.append((plan, measured(Path(folder, "run"), *task)))
                plan, run = (min(values) for values in zip(*times, strict=True))
                name = " ".join(word.removeprefix("strategy=").removeprefix("strategy.") for word in words)
                print(f"| {model} | {devices} | {name} | {plan:.1f} | {run:.1f} | {plan / run:.2f} |", flush=True)


if __name__ == "__main__":
    main()
