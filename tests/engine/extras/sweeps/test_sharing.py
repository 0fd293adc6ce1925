"""Processes of one machine divide its devices and job folders by locks; Optuna gets Hydra's sweep syntax."""

import multiprocessing as mp
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import Timeout
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from hydra_plugins.optuna_sweeper import search_space
from onecurve.extras.jobs import Job, job_folder
from onecurve.extras.sweeps.callback import report
from onecurve.extras.sweeps.devices import _reserve_gpus
from onecurve.launch import start as launching
from onecurve.records.files import named_lock

FORK = mp.get_context("fork")  # whose processes import nothing anew


def hold_gpus(count: int, seconds: float, found: Any) -> None:
    with _reserve_gpus(count):
        began = time.monotonic()
        time.sleep(seconds)
        found.put((os.environ["CUDA_VISIBLE_DEVICES"].split(","), began, time.monotonic()))


def test_parallel_jobs_see_different_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four jobs of one or two devices on four fictitious GPUs: no two jobs hold the same one at a time."""
    names = [f"{os.getpid()}-{letter}" for letter in "abcd"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    found = FORK.Queue()
    wanted = [1, 2, 1, 2]
    jobs = [FORK.Process(target=hold_gpus, args=(count, 1.5, found)) for count in wanted]
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
    with named_lock(name):
        held.set()
        time.sleep(100)


def test_lock_ends_with_its_process() -> None:
    name, held = f"test {os.getpid()}", FORK.Event()
    holder = FORK.Process(target=hold, args=(name, held))
    holder.start()
    assert held.wait(60)
    with pytest.raises(Timeout):
        named_lock(name).acquire(blocking=False)
    os.kill(holder.pid, signal.SIGKILL)  # type: ignore[arg-type]
    holder.join()
    named_lock(name).acquire(blocking=False)


def composed(*overrides: str) -> DictConfig:
    return OmegaConf.create({"hydra": {"overrides": {"task": list(overrides)}}})


def test_job_is_identified_by_its_overrides(tmp_path: Path) -> None:
    """Order, job number and the metric to compare do not matter, and interpolations compare as typed."""
    typed = ["seed=0", "note=${now:%f}"]
    assert job_folder(str(tmp_path), 0, _root_=composed(*typed)) == "0"
    assert job_folder(str(tmp_path), 5, _root_=composed(*reversed(typed))) == "0"
    assert job_folder(str(tmp_path), 0, _root_=composed("seed=1")) == "1"
    assert job_folder(str(tmp_path), 1, _root_=composed("seed=2")) == "2"
    assert job_folder(str(tmp_path), 5, _root_=composed(*typed, "optimized_metric=val/loss")) == "0"
    assert Job.read(tmp_path / "0").overrides == typed


def test_job_killed_with_its_launcher_counts_as_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, status in enumerate(("finished", "running")):
        (tmp_path / str(number)).mkdir()
        Job([f"seed={number}"], status).write(tmp_path / str(number))
    assert not report(tmp_path)
    assert "killed" in capsys.readouterr().out


def test_brackets_in_the_table_of_a_sweep_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "0").mkdir()
    Job(["callbacks=[ema,early_stopping]"], "failed", error="no file in [/data/x]").write(tmp_path / "0")
    assert not report(tmp_path)
    printed = capsys.readouterr().out
    assert "callbacks=[ema,early_stopping]" in printed
    assert "no file in [/data/x]" in printed


SLURM_TASK = {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train"}
SLURM_TASK |= {"SLURM_NTASKS_PER_NODE": "4", "SLURM_CPUS_PER_TASK": "6"}


@pytest.mark.parametrize(
    ("trainer", "single_process", "variables", "threads"),
    [
        ({"accelerator": "cpu", "devices": 4}, False, {}, 2),
        ({"accelerator": "cuda", "devices": [0, 1, 3]}, False, {}, 3),
        ({"accelerator": "cuda", "devices": 16}, False, {}, 1),
        ({"accelerator": "cuda", "devices": 4}, False, SLURM_TASK, 6),  # of its own
        ({"accelerator": "cuda", "devices": 4}, False, SLURM_TASK | {"TORCHELASTIC_RUN_ID": "x"}, 2),  # of one task
        ({"accelerator": "cuda", "devices": 4}, True, {}, None),
        ({"accelerator": "cuda", "devices": 1}, False, {}, None),
    ],
)
def test_ranks_divide_the_cores(
    trainer: dict[str, Any],
    single_process: bool,
    variables: dict[str, str],
    threads: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers: list[int] = []
    monkeypatch.setattr(launching, "log_to_folder", lambda *_: None)
    monkeypatch.setattr("onecurve.run.experiment.run_experiment", lambda *_: {})
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    for name in variables:
        monkeypatch.setenv(name, variables[name])
    strategy = {"single_process": single_process}
    cfg = {"run_dir": "", "trainer": trainer, "strategy": strategy}
    launching.run_rank(OmegaConf.create(cfg))
    assert numbers == ([] if threads is None else [threads])


def space(*overrides: str) -> tuple[dict[str, Any], list[str]]:
    return search_space(OverridesParser.create().parse_overrides(list(overrides)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("interval(0.1,2)", FloatDistribution(0.1, 2.0)),
        ("tag(log,interval(0.1,2))", FloatDistribution(0.1, 2.0, log=True)),
        ("int(interval(1,9))", IntDistribution(1, 9)),
        ("range(1,6,2)", IntDistribution(1, 5, step=2)),
        ("range(1,2)", IntDistribution(1, 1)),
        ("a,b", CategoricalDistribution(["a", "b"])),
    ],
)
def test_sweep_syntax(values: str, expected: Any) -> None:
    assert space(f"x={values}", "y=3") == ({"x": expected}, ["y=3"])
