"""The folders and records of the jobs of a sweep, and what follows from them."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from onecurve.checkpoint.format import VERSION
from onecurve.process.started_by import started_rank
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

    @property
    def end(self) -> str:
        """The status, but `killed` after the sweep."""
        return "killed" if self.status == "running" else self.status

    def write(self, folder: Path) -> None:
        with atomic_write(folder / JOB_FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(folder: Path) -> "Job":
        return Job(**json.loads((folder / JOB_FILE).read_text()))


def is_sweep(folder: Path) -> bool:
    """Return whether this is the folder of a sweep."""
    return any(folder.glob(f"*/{JOB_FILE}"))


def read_jobs(sweep: Path) -> Iterator[tuple[str, Job]]:
    """Yield the folder name and the record of each job of a sweep, in the order of the job numbers."""
    for file in sorted(sweep.glob(f"*/{JOB_FILE}"), key=lambda file: (len(file.parent.name), file.parent.name)):
        yield file.parent.name, Job.read(file.parent)


def find_job(sweep: Path, overrides: list[str]) -> tuple[str, Job] | None:
    """Return the folder name and the record of the job with these overrides; runs do not depend on their metric."""
    wanted = _without_metric(overrides)
    return next((found for found in read_jobs(sweep) if _without_metric(found[1].overrides) == wanted), None)


def _without_metric(overrides: list[str]) -> set[str]:
    return {word for word in overrides if not word.startswith("optimized_metric=")}


def job_folder(sweep: str, number: int, *, _root_: DictConfig) -> str:
    """Return the name of a job's folder in the sweep's folder: the one of an earlier start, or a new one.

    The overrides identify a job, so that a sweep can be continued with more jobs than before.
    """
    if started_rank() > 0:
        return "."  # this rank receives rank zero's folder
    overrides: Any = OmegaConf.to_container(_root_.hydra.overrides.task, resolve=False)  # as typed
    if found := find_job(Path(sweep), overrides):
        return found[0]
    while True:
        with suppress(FileExistsError):  # if several jobs start at once, only one can make the folder
            Path(sweep, str(number)).mkdir(parents=True)
            break
        number = int(number) + 1
    Job(overrides).write(Path(sweep, str(number)))
    return str(number)


class Sweep:
    """The jobs of a sweep folder, and how they compare.

    Attributes:
        jobs: the jobs by the names of their folders, in the order of their numbers.
        overrides: the overrides in which each of them differs from the others, without the Optuna sweeper's own.
        metric: the name of the optimized metric.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.jobs = path, dict(read_jobs(path))
        jobs = self.jobs.values()
        common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
        self.overrides = [
            [word for word in job.overrides if word not in common and not word.startswith("runtime.trial=")]
            for job in jobs
        ]
        self.metric = next((job.metric for job in jobs if job.metric), "result")

    @property
    def falls(self) -> bool:
        """Whether the lowest result is the best."""
        file = self.path / "multirun.yaml"
        saved = OmegaConf.load(file) if file.is_file() else OmegaConf.create()
        direction = OmegaConf.select(saved, "hydra.sweeper.direction")
        return direction == "minimize" if direction else self.metric.endswith("loss")

    @property
    def ranked(self) -> list[str]:
        """The names of the jobs that have a finite result, the best one last."""
        results = {name: job.result for name, job in self.jobs.items() if job.result is not None}
        finite = {name: result for name, result in results.items() if isfinite(result)}
        return sorted(finite, key=lambda name: finite[name], reverse=self.falls)

    def seed_rows(self) -> list[dict[str, Any]]:
        """Return the mean and standard deviation of the results of jobs that differ only in the seed."""
        results: dict[str, list[float]] = defaultdict(list)  # by the other overrides
        for job, overrides in zip(self.jobs.values(), self.overrides, strict=True):
            others = [word for word in overrides if not word.startswith("seed=")]
            if job.result is not None and len(others) < len(overrides):
                results[" ".join(others)].append(job.result)
        return [
            {
                "overrides": others,
                "seeds": len(values),
                f"{self.metric} mean": statistics.mean(values),
                f"{self.metric} std": statistics.stdev(values) if all(map(isfinite, values)) else nan,
            }
            for others, values in results.items()
            if len(values) > 1
        ]
