"""A sweep as its page shows it: the jobs with the options in which they differ, ordered by their results."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from src.report.files import read_yaml
from src.report.jobs import Job, differing_overrides, read_jobs

LEVELS = 4  # quarters of the jobs, by their results


@dataclass
class SweepJob:
    """A job with its folder's name, and the values of the options in which the jobs differ."""

    name: str
    job: Job
    options: dict[str, str]
    level: int = 0  # the quarter of the result, LEVELS - 1 for the best; 0 without a result

    @property
    def status(self) -> str:
        return "killed" if self.job.status == "running" else self.job.status


class Sweep:
    """A sweep folder; its jobs are in the order of their numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        named = list(read_jobs(self.path))
        differing = differing_overrides([job.overrides for _, job in named])
        names = {_split(word)[0] for words in differing for word in words}
        self.jobs = [SweepJob(name, job, _options(job.overrides, names)) for name, job in named]
        self.metric = next((job.metric for _, job in named if job.metric), "result")
        # What Hydra has saved of the sweeper, such as Optuna's direction and storage.
        self.sweeper: dict[str, Any] = read_yaml(self.path / "multirun.yaml").get("hydra", {}).get("sweeper") or {}
        self._set_levels()

    @property
    def options(self) -> list[str]:
        """The options in which the jobs differ, the seed last."""
        names = dict.fromkeys(name for job in self.jobs for name in job.options)
        return sorted(names, key=lambda name: name == "seed")

    @property
    def falls(self) -> bool:
        """Whether the lowest result is the best."""
        return self.sweeper.get("direction") == "minimize" or (
            "direction" not in self.sweeper and self.metric.endswith("loss")
        )

    @property
    def ranked(self) -> list[SweepJob]:
        """The jobs that have a result, the best one last."""
        with_result = [job for job in self.jobs if job.job.result is not None and np.isfinite(job.job.result)]
        return sorted(with_result, key=lambda job: job.job.result or 0.0, reverse=self.falls)

    def _set_levels(self) -> None:
        ranked = self.ranked
        for position, job in enumerate(ranked):
            job.level = LEVELS * position // len(ranked) if len(ranked) >= LEVELS else LEVELS - 1


def _options(overrides: list[str], names: set[str]) -> dict[str, str]:
    """Return the values of the named options; of an option that is given twice, the last one."""
    return {name: value for name, value in map(_split, overrides) if name in names}


def _split(override: str) -> tuple[str, str]:
    name, _, value = override.partition("=")
    return name.lstrip("+~"), value
