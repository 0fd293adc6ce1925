"""The resolvers that `hydra.run.dir` and `hydra.sweep.subdir` in conf/train.yaml use."""

from omegaconf import OmegaConf

from src.run.folder import run_folder
from src.sweeps.record import job_folder


def register_resolvers() -> None:
    """Register `run_folder`, the folder of a run, and `job_folder`, the folder name of a job in a sweep."""
    OmegaConf.register_new_resolver("run_folder", run_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)
