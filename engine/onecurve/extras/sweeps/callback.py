"""Hydra callback for sweeps. Every start imports this file, so heavy imports are inside the functions."""

import atexit
import os
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from onecurve.config.folder import register_resolvers
from onecurve.extras.jobs import job_folder, read_jobs

register_resolvers()  # joblib and submitit import this file in their processes, where Hydra composes the config again
OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)


class SweepReport(Callback):
    """Callback that refuses a sweep started by torchrun or srun, and prints the report at the end of a sweep.

    The exit code is 1 unless every job has finished.
    """

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._sweep_pid = os.getpid()  # the sweep's process, also where a launcher unpickles this object
        from onecurve.process.rank import detect_cluster_environment

        if env := detect_cluster_environment():
            message = "error: -m: a sweep starts the processes of its jobs, so start it without torchrun or srun"
            sys.exit(message if env.global_rank() == 0 else 1)
        # Hydra calls no hook at the end of a sweep that a signal stops.
        atexit.register(self._report, config)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Make joblib's processes end with the sweep. By default they continue their jobs, as submitit's should."""
        if config.hydra.launcher._target_.endswith("JoblibLauncher") and os.getpid() != self._sweep_pid:
            from onecurve.process.signals import die_with_parent

            die_with_parent(self._sweep_pid)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        atexit.unregister(self._report)
        if not self._report(config):
            raise SystemExit(1)

    def _report(self, config: DictConfig) -> bool:
        """Print the tables and write the page; return whether every job has finished."""
        from onecurve.extras.sweeps.table import report
        from onecurve.launch.outcome import write_report

        folder = Path(config.hydra.sweep.dir)
        if not list(read_jobs(folder)):  # an error has ended the sweep before its first job
            return False
        is_complete = report(folder)
        if config.report:
            write_report(folder)
        return is_complete
