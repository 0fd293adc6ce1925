"""The resolvers of the folders in conf/."""

from omegaconf import OmegaConf

from src.run.folder import project_path, run_folder, sweep_folder, unique_name
from src.sweeps.record import job_folder


def register_resolvers() -> None:
    """Register the functions. `use_cache` lets an interpolation keep its first value."""
    OmegaConf.register_new_resolver("unique_name", unique_name, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("project_path", project_path, replace=True)
    OmegaConf.register_new_resolver("run_folder", run_folder, replace=True)
    OmegaConf.register_new_resolver("sweep_folder", sweep_folder, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)
