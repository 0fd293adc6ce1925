"""The record of each job of a sweep: `job.json` in its folder, which the result table and a restart use."""

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

    def write(self, folder: Path) -> None:
        with atomic_write(folder / _FILE) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(folder: Path) -> "Job":
        return Job(**json.loads((folder / _FILE).read_text()))


def read_jobs(sweep: Path) -> Iterator[tuple[str, Job]]:
    """Yield the folder name and the record of each job of a sweep, in the order of the job numbers."""
    for file in sorted(sweep.glob(f"*/{_FILE}"), key=lambda file: (len(file.parent.name), file.parent.name)):
        if file.stat().st_size:  # an empty file was just created, or its process died at once
            yield file.parent.name, Job.read(file.parent)


def job_folder(sweep: str, number: int, *, _root_: DictConfig) -> str:
    """Return the name of a job's folder in the sweep's folder: the one of an earlier start, or a new one.

    The overrides identify a job, so that a sweep can be continued with more jobs than before.
    """
    if not is_rank_zero():
        return "."  # this rank receives rank zero's folder
    overrides: Any = OmegaConf.to_container(_root_.hydra.overrides.task, resolve=False)  # as typed
    for name, job in read_jobs(Path(sweep)):
        if sorted(job.overrides) == sorted(overrides):
            return name
    return _create_folder(Path(sweep), int(number), Job(overrides))


def _create_folder(sweep: Path, first_number: int, job: Job) -> str:
    """Create the folder with the first free number from `first_number` on, write the record, and return its name."""
    for number in itertools.count(first_number):
        folder = sweep / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            (folder / _FILE).touch(exist_ok=False)  # if several jobs start at once, only one can create the file
        except FileExistsError:
            continue
        job.write(folder)
        return folder.name
    raise AssertionError("some number is free")
