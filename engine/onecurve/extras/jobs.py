"""The folders and records of the jobs of a sweep, and what follows from them."""

import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from onecurve.checkpoint.format import VERSION
from onecurve.process.launcher import started_rank
from onecurve.records.files import atomic_write

JOB_FILE = "job.json"
DONE = ("finished", "pruned")


@dataclass
class Job:
    """The record of one job; `status` is running, stopped (by a signal), finished, pruned or failed.

    A stopped job can be continued. A job whose status is still `running` after the sweep was killed with its launcher.
    """

    overrides: list[str]
    status: str = "running"
    metric: str = ""  # the name of the optimized metric
    result: float | None = None  # its value
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # duration since its last start
    error: str = ""
    onecurve: str = VERSION

    def write(self, folder: Path) -> None:
        with atomic_write(folder / JOB_FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(folder: Path) -> "Job":
        return Job(**json.loads((folder / JOB_FILE).read_text()))


def identity(overrides: list[str]) -> list[str]:
    """Return the overrides by which a job of a sweep is found again: all that the run itself depends on."""
    return sorted(word for word in overrides if not word.startswith("optimized_metric="))


def is_sweep(folder: Path) -> bool:
    """Return whether this is the folder of a sweep."""
    return any(folder.glob(f"*/{JOB_FILE}"))


def read_jobs(sweep: Path) -> Iterator[tuple[str, Job]]:
    """Yield the folder name and the record of each job of a sweep, in the order of the job numbers."""
    for file in sorted(sweep.glob(f"*/{JOB_FILE}"), key=lambda file: (len(file.parent.name), file.parent.name)):
        yield file.parent.name, Job.read(file.parent)


def job_folder(sweep: str, number: int, *, _root_: DictConfig) -> str:
    """Return the name of a job's folder in the sweep's folder: the one of an earlier start, or a new one.

    The overrides identify a job, so that a sweep can be continued with more jobs than before.
    """
    if started_rank() > 0:
        return "."  # this rank receives rank zero's folder
    overrides: Any = OmegaConf.to_container(_root_.hydra.overrides.task, resolve=False)  # as typed
    for name, job in read_jobs(Path(sweep)):
        if identity(job.overrides) == identity(overrides):
            return name
    for folder in (Path(sweep, str(free)) for free in itertools.count(int(number))):
        try:
            folder.mkdir(parents=True)  # if several jobs start at once, only one can make the folder
        except FileExistsError:
            continue
        Job(overrides).write(folder)
        return folder.name
    raise AssertionError("some number is free")


def differing_overrides(overrides: list[list[str]]) -> list[list[str]]:
    """Return each job's overrides without the ones that all jobs have, and without the Optuna sweeper's own."""
    common = set.intersection(*map(set, overrides)) if len(overrides) > 1 else set()
    return [
        [word for word in job_overrides if word not in common and not word.startswith("runtime.trial=")]
        for job_overrides in overrides
    ]


def seed_rows(jobs: list[Job], overrides: list[list[str]], metric: str) -> list[dict[str, Any]]:
    """Return the mean and standard deviation of the results of jobs that differ only in the seed."""
    results: dict[str, list[float]] = {}  # by the other overrides
    for job, differing in zip(jobs, overrides, strict=True):
        others = [override for override in differing if not override.startswith("seed=")]
        if job.result is not None and len(others) < len(differing):
            results.setdefault(" ".join(others), []).append(job.result)
    return [
        {
            "overrides": others,
            "seeds": len(values),
            f"{metric} mean": statistics.mean(values),
            f"{metric} std": statistics.stdev(values) if all(map(isfinite, values)) else nan,
        }
        for others, values in results.items()
        if len(values) > 1
    ]
