"""Hydra callback for sweeps, and their result tables on the terminal and as CSV files.

Every start imports this file, so heavy imports are inside the functions.
"""

import atexit
import csv
import os
import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from onecurve.config.folder import register_resolvers
from onecurve.extras.jobs import DONE, Job, Sweep, is_sweep, job_folder
from onecurve.process.started_by import detect_cluster_environment
from onecurve.records.files import atomic_write

_MAX_ERROR_LENGTH = 80  # characters of a job's error that the table shows

register_resolvers()  # joblib and submitit import this file in their processes, where Hydra composes the config again
OmegaConf.register_new_resolver("job_folder", job_folder, replace=True)


class SweepReport(Callback):
    """Refuses a sweep started by torchrun or srun, and reports at the end; the exit code is 0 if all jobs finished."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._sweep_pid = os.getpid()  # the sweep's process, also where a launcher unpickles this object
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
        from onecurve.launch.outcome import write_report

        folder = Path(config.hydra.sweep.dir)
        if not is_sweep(folder):  # an error has ended it before its first job
            return False
        is_complete = report(folder)
        if config.report:
            write_report(folder)
        return is_complete


def report(folder: Path) -> bool:
    """Print the tables, write `sweep.csv` and `seeds.csv`; return whether every job has finished."""
    sweep = Sweep(folder)
    named = zip(sweep.jobs.items(), sweep.overrides, strict=True)
    rows = [_job_row(name, job, overrides, sweep.metric) for (name, job), overrides in named]
    _write(folder / "sweep.csv", rows)
    _print(f"{len(rows)} jobs in {folder}", rows, ["job", "overrides", sweep.metric, "seconds", "status"])
    if over_seeds := sweep.seed_rows():
        _write(folder / "seeds.csv", over_seeds)
        _print("over seeds", over_seeds, list(over_seeds[0]))
    return all(job.status in DONE for job in sweep.jobs.values())


def _job_row(name: str, job: Job, overrides: list[str], metric: str) -> dict[str, Any]:
    """Return the table cells of one job: the optimized metric has the third column, the others come last."""
    return {
        "job": name,
        "overrides": " ".join(overrides),
        metric: job.result,
        "seconds": f"{job.seconds:.1f}",
        "status": job.end,
        "error": "".join(job.error.strip().splitlines()[-1:]),  # of a traceback: the exception
    } | job.metrics


def _print(title: str, rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Print a table; the last column also shows the error of a job."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title)
    for row in rows:
        cells = [f"{row[name]:.4f}" if isinstance(row[name], float) else str(row[name] or "") for name in columns]
        if row.get("error"):
            cells[-1] += f": {row['error'][:_MAX_ERROR_LENGTH]}"
        table.add_row(*cells)
    # Without markup, which takes `[ema,early_stopping]` for a style, and fails at the `[/path]` of an error.
    Console(width=None if sys.stdout.isatty() else 200, markup=False).print(table)


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_write(file) as temporary, temporary.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)
