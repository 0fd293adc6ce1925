"""Kill runs at random times and resume them elsewhere: `python -m tests.faults.kills --trials 50`.

Every third kill is uniform over the full run, of which most is startup. The others are uniform over training.
"""

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from src.data.sources.shapes import Shapes
from src.run.resume import newest_checkpoint, remove_partial_checkpoints
from tests.support.commands import PARITY, TWO, callback, ranks, start, wait_for_exit, wait_until
from tests.support.comparison import relative
from tests.support.experiments import SIZES
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit

KILLED = [*PARITY, "callbacks.checkpoint.every_n_train_steps=2", "test=false"]
ELSEWHERE = {"auto": [1], "ddp": [2, 4], "fsdp": [2], "pipeline": [2]}
VICTIMS = ["rank 0", "rank 1", "launcher", "all"]


class Trial(NamedTuple):
    """One kill and its resumption."""

    victim: str
    seconds: float  # from the command, or from the start of training
    phase: str
    saved: int
    strategy: str
    devices: int

    def __str__(self) -> str:
        world = f"{self.strategy} x {self.devices}"
        return f"{self.victim:<8} after {self.seconds:5.2f} s, {self.phase:<10}: from step {self.saved:>2} on {world}"


def trials(count: int, seed: int, pool: Pool, folder: Path) -> Iterator[Trial]:
    """Kill runs, resume each under another strategy, and compare them with an uninterrupted run.

    Raises:
        AssertionError: if a sample was trained on twice or never, a row of metrics.csv is missing or wrong, or a
            weight differs by more than a relative 1e-9.
    """
    rng, task = random.Random(seed), [*_data(folder), *KILLED]
    reference = fit(compose(folder / "uninterrupted", *task))
    total, training = _durations(_command(task, folder / "timed"), folder / "timed")
    for number in range(count):
        place = folder / f"trial{number}"
        victim, from_start = VICTIMS[number % len(VICTIMS)], number % 3 == 0
        moment = rng.uniform(0, total if from_start else training)
        phase = _kill(_command(task, place), place, victim, moment, from_start)
        strategy = rng.choice(list(ELSEWHERE))
        devices = rng.choice(ELSEWHERE[strategy])
        remove_partial_checkpoints(place)
        newest = newest_checkpoint(place)
        resume = [f"ckpt_path={newest}"] if newest else []
        saved = torch.load(newest)["global_step"] if newest else 0
        cfg = compose(place, *task, f"strategy={strategy}", f"trainer.devices={devices}", *resume)
        records = pool.run(devices, fit, cfg) if devices > 1 else [fit(cfg)]
        trial = Trial(victim, moment, phase, saved, strategy, devices)
        _check(trial, records, reference, place, folder / "uninterrupted")
        yield trial


def table(done: list[Trial]) -> str:
    """Return a Markdown table of kills by phase and victim."""
    count = Counter((trial.phase, trial.victim) for trial in done)
    phases = sorted({trial.phase for trial in done})
    lines = [f"| killed in | {' | '.join(VICTIMS)} |", f"| --- |{' --- |' * len(VICTIMS)}"]
    lines += [f"| {phase} | {' | '.join(str(count[phase, victim]) for victim in VICTIMS)} |" for phase in phases]
    return "\n".join(lines)


def _data(folder: Path) -> list[str]:
    Shapes(**SIZES).prepare(folder / "data")
    sizes = (f"data.source.{name}={size}" for name, size in SIZES.items())
    return ["data=shapes", f"data.root={folder}/data", *sizes]


def _command(task: list[str], folder: Path) -> list[str]:
    folder.mkdir()
    return [*task, *TWO, callback("PhaseReport", folder=folder), f"run_dir={folder}"]


def _durations(command: list[str], folder: Path) -> tuple[float, float]:
    """Return seconds from the command, and from the start of training, to the end."""
    command_start = time.time()
    code, _, err = wait_for_exit(start(*command))
    assert code == 0, err
    training_start, end = ((folder / name).stat().st_mtime for name in ("config.yaml", "phase"))
    return end - command_start, end - training_start


def _kill(command: list[str], folder: Path, victim: str, moment: float, from_start: bool) -> str:
    """Kill, wait until all processes have ended, and return the phase of the run."""
    process = start(*command)
    while not from_start and not (folder / "config.yaml").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(moment)
    started = ranks(process.pid)
    phase = _phase(folder, process)
    targets = started if victim == "all" else [started[int(victim[-1])]] if victim[-1] in "01" and started[1:] else []
    for pid in [*targets, *([process.pid] if victim == "all" or not targets else [])]:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    _, _, err = wait_for_exit(process)
    if targets and victim != "all" and phase not in ("over", "ending"):
        assert f"{victim} died" in err, err[-3000:]
    ended = wait_until(lambda: not subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).stdout, 10)
    assert ended, "processes left running"
    return phase


def _phase(folder: Path, process: "subprocess.Popen[str]") -> str:
    if process.poll() is not None:
        return "over"
    return (folder / "phase").read_text() or "training" if (folder / "phase").exists() else "start"


def _check(trial: Trial, resumed: list[Record], reference: Record, folder: Path, uninterrupted: Path) -> None:
    before = _samples(folder)
    for step, expected in enumerate(reference.indices):
        parts = before[step] if step < trial.saved else [record.indices[step - trial.saved] for record in resumed]
        if trial.strategy == "pipeline" and step >= trial.saved:  # each stage gets the indices of the complete batch
            assert all(sorted(part) == sorted(expected) for part in parts), trial
        else:
            assert sorted(index for part in parts for index in part) == sorted(expected), trial
    assert all(len(record.indices) == len(reference.indices) - trial.saved for record in resumed), trial
    ours, theirs = (torch.load(place / "checkpoints" / "last.ckpt")["state_dict"] for place in (folder, uninterrupted))
    assert max(relative(ours[name], tensor) for name, tensor in theirs.items()) < 1e-9, trial
    assert _losses(folder) == _Close(_losses(uninterrupted)), trial


def _samples(folder: Path) -> dict[int, list[list[int]]]:
    """Return the sample indices of each step and rank that the killed run wrote."""
    steps: dict[int, list[list[int]]] = {}
    for file in folder.glob("samples.*"):
        for line in file.read_text().splitlines():
            step, *indices = map(int, line.split())
            steps.setdefault(step, []).append(indices)
    return steps


def _losses(folder: Path) -> list[tuple[int, float, float]]:
    """Return step, training and validation loss of each training row."""
    lines = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    names = ("step", "train/loss", "val/loss")
    columns = [lines[0].index(name) for name in names]
    trained = [row for row in lines[1:] if row[columns[1]]]  # skips the row of the test
    rows = [[float(row[column] or 0) for column in columns] for row in trained]
    return [(int(step), train, val) for step, train, val in rows]


class _Close(list[tuple[int, float, float]]):
    """Rows that equal others up to a relative 1e-9."""

    def __eq__(self, other: object) -> bool:
        ours, theirs = torch.tensor(self, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pool = Pool(4)
    try:
        with tempfile.TemporaryDirectory() as folder:
            done = []
            for trial in trials(options.trials, options.seed, pool, Path(folder)):
                done.append(trial)
                print(f"{len(done):>3} {trial}", flush=True)
        print(f"\n{table(done)}\n\n{len(done)} of {options.trials} trials passed")
    finally:
        pool.stop()


if __name__ == "__main__":
    main()
