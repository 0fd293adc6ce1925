"""The resolvers of the folders in conf/, and the folder of each job of a sweep."""

import itertools
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from src.engine.config.folder import is_rank_zero, project_path, run_folder, sweep_folder, unique_name
from src.engine.state.jobs import JOB_FILE, Job, read_jobs


def register_resolvers() -> None:
    """Register the functions. `use_cache` lets an interpolation keep its first value."""
    OmegaConf.register_new_resolver("unique_name", unique_name, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("project_path", project_path, replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    OmegaConf.register_new_resolver("sweep_folder", sweep_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)


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
            (folder / JOB_FILE).touch(exist_ok=False)  # if several jobs start at once, only one can create the file
        except FileExistsError:
            continue
        job.write(folder)
        return folder.name
    raise AssertionError("some number is free")
