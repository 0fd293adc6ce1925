"""Result tables of a sweep: its jobs, and the means over seeds, on the terminal and as CSV files."""

import csv
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from src.sweeps.record import DONE, Job, read_jobs
from src.utils.files import atomic_write

_MAX_ERROR_LENGTH = 80  # characters of a job's error that the table shows


def report(sweep: Path) -> bool:
    """Print the tables, write `sweep.csv` and `seeds.csv`; return whether every job has finished."""
    named_jobs = list(read_jobs(sweep))
    jobs = [job for _, job in named_jobs]
    metric = next((job.metric for job in jobs if job.metric), "result")
    overrides = _differing_overrides([job.overrides for job in jobs])
    rows = [
        _job_row(name, job, differing, metric) for (name, job), differing in zip(named_jobs, overrides, strict=True)
    ]
    _write(sweep / "sweep.csv", rows)
    shown = ("job", "overrides", metric, "seconds", "status")
    _print(f"{len(rows)} jobs in {sweep}", [_shown_cells(row, shown) for row in rows])
    if seed_rows := _seed_rows(jobs, overrides, metric):
        _write(sweep / "seeds.csv", seed_rows)
        _print("over seeds", [_shown_cells(row, tuple(row)) for row in seed_rows])
    return all(job.status in DONE for job in jobs)


def _differing_overrides(overrides: list[list[str]]) -> list[list[str]]:
    """Return each job's overrides without the ones that all jobs have, and without the Optuna sweeper's own."""
    common = set.intersection(*map(set, overrides)) if len(overrides) > 1 else set()
    return [
        [word for word in job_overrides if word not in common and not word.startswith("runtime.trial=")]
        for job_overrides in overrides
    ]


def _job_row(name: str, job: Job, overrides: list[str], metric: str) -> dict[str, Any]:
    """Return the table cells of one job: the optimized metric has the third column, the others come last."""
    cells = {
        "job": name,
        "overrides": " ".join(overrides),
        metric: job.result,
        "seconds": f"{job.seconds:.1f}",
        "status": "killed" if job.status == "running" else job.status,
        "error": _last_line(job.error),
    }
    return cells | job.metrics


def _last_line(error: str) -> str:
    """Return the last line of a traceback, which names the exception."""
    return (error.strip().splitlines() or [""])[-1]


def _seed_rows(jobs: list[Job], overrides: list[list[str]], metric: str) -> list[dict[str, Any]]:
    """Return the mean and standard deviation of the results of jobs that differ only in the seed."""
    results: dict[str, list[float]] = {}  # by the other overrides
    for job, differing in zip(jobs, overrides, strict=True):
        others = [override for override in differing if not override.startswith("seed=")]
        if job.result is not None and len(others) < len(differing):
            results.setdefault(" ".join(others), []).append(job.result)
    return [
        {
            "overrides": others,
            "seeds": len(values),
            f"{metric} mean": statistics.mean(values),
            f"{metric} std": statistics.stdev(values),
        }
        for others, values in results.items()
        if len(values) > 1
    ]


def _shown_cells(row: dict[str, Any], columns: tuple[str, ...]) -> dict[str, str]:
    """Return the cells of these columns as text, for the terminal."""
    cells = {name: row[name] for name in columns}
    if row.get("error"):
        cells["status"] += f": {row['error'][:_MAX_ERROR_LENGTH]}"
    return {name: f"{value:.4f}" if isinstance(value, float) else str(value or "") for name, value in cells.items()}


def _print(title: str, rows: list[dict[str, str]]) -> None:
    table = Table(*(rows[0] if rows else ()), title=title)
    for row in rows:
        table.add_row(*row.values())
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_write(file) as temporary, temporary.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)
