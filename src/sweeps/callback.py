"""Hydra's hooks around a sweep. This file is imported at every start: nothing heavy here."""

import os
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from src.sweeps.resolvers import register_resolvers

register_resolvers()  # joblib and submitit import this in their processes, where Hydra composes again


class SweepReport(Callback):
    """Refuses a sweep that torchrun or srun started; reports at the end, and says by the exit code if a job failed."""

    def __init__(self) -> None:
        self._sweep = os.getpid()  # also where the launcher unpickles this

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        from src.launch.external import detect_cluster_environment

        if env := detect_cluster_environment():
            if env.global_rank() == 0:
                print("error: -m: a sweep starts the processes of its jobs: no torchrun or srun", file=sys.stderr)
            raise SystemExit(1)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Have joblib's processes end with the sweep, which by themselves go on with their job; submitit's should."""
        if config.hydra.launcher._target_.endswith("JoblibLauncher") and os.getpid() != self._sweep:
            from src.launch.workers import die_with_parent

            die_with_parent(self._sweep)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        from src.sweeps.table import report

        if not report(Path(config.hydra.sweep.dir)):
            raise SystemExit(1)
