"""Processes of one machine divide its devices and job folders by locks."""

import multiprocessing as mp
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from src.sweeps.devices import _reserve_gpus
from src.sweeps.record import Job, job_folder
from src.sweeps.table import report
from src.utils.locks import hold_lock, try_lock

SPAWN = mp.get_context("spawn")


def hold_gpus(count: int, seconds: float, found: Any) -> None:
    with _reserve_gpus(count):
        began = time.monotonic()
        time.sleep(seconds)
        found.put((os.environ["CUDA_VISIBLE_DEVICES"].split(","), began, time.monotonic()))


def test_parallel_jobs_see_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four jobs of one or two devices on four fictitious GPUs: no two jobs hold the same one at a time."""
    names = [f"{os.getpid()}-{letter}" for letter in "abcd"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    found = SPAWN.Queue()
    wanted = [1, 2, 1, 2]
    jobs = [SPAWN.Process(target=hold_gpus, args=(count, 1.5, found)) for count in wanted]
    for job in jobs:
        job.start()
    spans = [found.get(timeout=100) for _ in jobs]
    for job in jobs:
        job.join()
    assert sorted(len(seen) for seen, _, _ in spans) == sorted(wanted)
    assert {name for seen, _, _ in spans for name in seen} <= set(names)
    together = [(a, b) for a in spans for b in spans if a is not b and a[1] < b[2] and b[1] < a[2]]
    assert together
    assert all(not set(a[0]) & set(b[0]) for a, b in together)


def hold(name: str, held: Any) -> None:
    with hold_lock(name):
        held.set()
        time.sleep(100)


def test_lock_ends_with_its_process() -> None:
    name, held = f"test {os.getpid()}", SPAWN.Event()
    holder = SPAWN.Process(target=hold, args=(name, held))
    holder.start()
    assert held.wait(60)
    assert try_lock(name) is None
    os.kill(holder.pid, signal.SIGKILL)  # type: ignore[arg-type]
    holder.join()
    lock = try_lock(name)
    assert lock is not None
    lock.close()


def composed(*overrides: str) -> DictConfig:
    return OmegaConf.create({"hydra": {"overrides": {"task": list(overrides)}}})


def test_job_is_identified_by_its_overrides(tmp_path: Path) -> None:
    """Order and job number do not matter, and interpolations compare as typed."""
    typed = ["seed=0", "note=${now:%f}"]
    assert job_folder(str(tmp_path), 0, _root_=composed(*typed)) == "0"
    assert job_folder(str(tmp_path), 5, _root_=composed(*reversed(typed))) == "0"
    assert job_folder(str(tmp_path), 0, _root_=composed("seed=1")) == "1"
    assert job_folder(str(tmp_path), 1, _root_=composed("seed=2")) == "2"
    assert Job.read(tmp_path / "0").overrides == typed


def test_job_killed_with_its_launcher_counts_as_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, status in enumerate(("finished", "running")):
        (tmp_path / str(number)).mkdir()
        Job([f"seed={number}"], status).write(tmp_path / str(number))
    assert not report(tmp_path)
    assert "killed" in capsys.readouterr().out
