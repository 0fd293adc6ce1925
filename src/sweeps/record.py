"""What is known of each job of a sweep: `job.json` in its folder, from which the table and a restart are made."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from src.run.folder import is_rank_zero
from src.utils.files import atomic_write

_FILE = "job.json"
DONE = ("finished", "pruned")


@dataclass
class Job:
    """One job: `status` is running, stopped (by a signal, to be continued), finished, pruned or failed.

    A job whose record still says `running` when the sweep is over was killed together with its launcher.
    """

    overrides: list[str]
    status: str = "running"
    result: float | None = None  # the optimized metric
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0  # of its last start
    error: str = ""

    def write(self, folder: Path) -> None:
        with atomic_write(folder / _FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(folder: Path) -> "Job":
        return Job(**json.loads((folder / _FILE).read_text()))


def jobs(sweep: Path) -> Iterator[tuple[str, Job]]:
    """The jobs of a sweep and their folders' names, in the order of their numbers."""
    for file in sorted(sweep.glob(f"*/{_FILE}"), key=lambda file: (len(file.parent.name), file.parent.name)):
        if file.stat().st_size:  # empty: claimed at this moment, or by a process that died at once
            yield file.parent.name, Job.read(file.parent)


def job_folder(sweep: str, number: int, *, _root_: DictConfig) -> str:
    """The name of a job's folder below its sweep's: the one it had when it was started before, or one of its own.

    A job is known by its overrides, so that a sweep may be continued with more jobs than it had.
    """
    if not is_rank_zero():
        return "."  # it learns rank zero's
    overrides: Any = OmegaConf.to_container(_root_.hydra.overrides.task, resolve=False)  # as they were typed
    for name, job in jobs(Path(sweep)):
        if sorted(job.overrides) == sorted(overrides):
            return name
    for candidate in itertools.count(int(number)):
        folder = Path(sweep) / str(candidate)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / _FILE).touch(exist_ok=False)  # of several jobs that start at once, one gets it
        except FileExistsError:
            continue
        Job(overrides).write(folder)
        return folder.name
    raise AssertionError
