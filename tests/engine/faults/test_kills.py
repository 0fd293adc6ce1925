"""SIGKILL at random, fifty times: the run, resumed under another strategy, equals the uninterrupted one.

Every third kill is uniform over the full run, of which most is startup. The others are uniform over training.
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from onecurve.checkpoint.newest import newest_checkpoint
from tests.support.commands import PARITY, TWO, callback, ranks, start, wait_for_exit, wait_until
from tests.support.comparison import check_last_checkpoints, check_same_rows
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit, fit_ranks

TASK = [*PARITY, "callbacks.checkpoint.every_n_train_steps=2", "test=false"]
ELSEWHERE = [("auto", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 2), ("pipeline", 2)]
VICTIMS = ["rank 0", "rank 1", "launcher", "all"]


def start_run(small: list[str], folder: Path) -> "subprocess.Popen[str]":
    return start(*small, *TASK, *TWO, callback("SampleReport", folder=folder), f"run_dir={folder}")


@pytest.fixture(scope="module")
def reference(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Record:
    return fit(compose(tmp_path_factory.mktemp("uninterrupted"), *small, *TASK))


@pytest.fixture(scope="module")
def durations(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """Return seconds from the command, and from the start of training, to the last step."""
    folder, begin = tmp_path_factory.mktemp("timed"), time.time()
    code, _, err = wait_for_exit(start_run(small, folder))
    assert code == 0, err
    training, end = ((folder / name).stat().st_mtime for name in ("config.yaml", "samples.0"))
    return end - begin, end - training


@pytest.mark.slow
@pytest.mark.parametrize("number", range(50))
def test_resumes_after_a_random_kill(
    number: int, reference: Record, durations: tuple[float, float], pool: Pool, small: list[str], folder: Path
) -> None:
    rng, from_start = random.Random(number), number % 3 == 0
    folder.mkdir()
    process = start_run(small, folder)
    while not from_start and not (folder / "config.yaml").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(rng.uniform(0, durations[0 if from_start else 1]))
    kill(process, VICTIMS[number % len(VICTIMS)])
    strategy, devices = rng.choice(ELSEWHERE)
    newest = newest_checkpoint(folder)
    saved = torch.load(newest)["global_step"] if newest else 0
    resume = [f"ckpt_path={newest}"] if newest else []
    cfg = compose(folder, *small, *TASK, f"strategy={strategy}", f"trainer.devices={devices}", *resume)
    check_samples(read_samples(folder), fit_ranks(cfg, pool), saved, reference)
    check_last_checkpoints(folder, reference.file.parent)
    check_same_rows(folder, reference.file.parent)


def kill(process: "subprocess.Popen[str]", victim: str) -> None:
    """Kill, and wait until all processes have ended. Without such a rank the launcher is killed."""
    started = ranks(process.pid)
    targets = {"all": [*started, process.pid], "rank 0": started[:1], "rank 1": started[1:]}.get(victim, [])
    for pid in targets or [process.pid]:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    wait_for_exit(process)
    ended = wait_until(lambda: not subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True).stdout, 10)
    assert ended, "processes left running"


def read_samples(folder: Path) -> dict[int, list[list[int]]]:
    """Return the sample indices of each step and rank that the killed run wrote."""
    steps: dict[int, list[list[int]]] = {}
    for file in folder.glob("samples.*"):
        for line in file.read_text().splitlines():
            step, *indices = map(int, line.split())
            steps.setdefault(step, []).append(indices)
    return steps


def check_samples(before: dict[int, list[list[int]]], resumed: list[Record], saved: int, reference: Record) -> None:
    """Check that the ranks trained each sample of each step once. Each stage of a pipeline gets the complete batch."""
    assert all(len(record.indices) == len(reference.indices) - saved for record in resumed)
    for step, expected in enumerate(reference.indices):
        parts = before[step] if step < saved else [record.indices[step - saved] for record in resumed]
        if all(len(part) == len(expected) for part in parts):
            assert all(sorted(part) == sorted(expected) for part in parts)
        else:
            assert sorted(index for part in parts for index in part) == sorted(expected)
