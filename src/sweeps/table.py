"""Result tables of a sweep: its jobs, and the means over seeds, on the terminal and as CSV files."""

import csv
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from src.sweeps.record import DONE, Job, jobs
from src.utils.files import atomic_write

_ERROR = 80  # characters of a job's error that the table shows


def report(sweep: Path) -> bool:
    """Print the tables, write `sweep.csv` and `seeds.csv`; return whether every job has finished."""
    found = list(jobs(sweep))
    shown = _differing([job.overrides for _, job in found])
    rows = [_row(name, job, overrides) for (name, job), overrides in zip(found, shown, strict=True)]
    _write(sweep / "sweep.csv", rows)
    _print(f"{len(rows)} jobs in {sweep}", [_brief(row) for row in rows])
    if seeds := _over_seeds(found, shown):
        _write(sweep / "seeds.csv", seeds)
        _print("over seeds", [_brief(row) for row in seeds])
    return all(job.status in DONE for _, job in found)


def _differing(overrides: list[list[str]]) -> list[list[str]]:
    """Return the overrides of each job that not all jobs share, without the `runtime.trial=` of the Optuna sweeper."""
    common = set.intersection(*map(set, overrides)) if len(overrides) > 1 else set()
    differing = [[word for word in words if word not in common] for words in overrides]
    return [[word for word in words if not word.startswith("runtime.trial=")] for words in differing]


def _row(name: str, job: Job, overrides: list[str]) -> dict[str, Any]:
    """Return the table cells of one job; all its metrics come last."""
    status = "killed" if job.status == "running" else job.status
    what = {"job": name, "overrides": " ".join(overrides), "result": job.result}
    return what | {"seconds": f"{job.seconds:.1f}", "status": status, "error": _last_line(job.error)} | job.metrics


def _last_line(error: str) -> str:
    """Return the last line of a traceback, which names the exception."""
    return (error.strip().splitlines() or [""])[-1]


def _over_seeds(found: list[tuple[str, Job]], shown: list[list[str]]) -> list[dict[str, Any]]:
    """Return the mean and standard deviation of the results of jobs that differ only in the seed."""
    groups: dict[str, list[float]] = {}
    for (_, job), overrides in zip(found, shown, strict=True):
        if job.result is not None and any(word.startswith("seed=") for word in overrides):
            rest = " ".join(word for word in overrides if not word.startswith("seed="))
            groups.setdefault(rest, []).append(job.result)
    return [
        {"overrides": rest, "seeds": len(results), "mean": statistics.mean(results), "std": statistics.stdev(results)}
        for rest, results in groups.items()
        if len(results) > 1
    ]


def _brief(row: dict[str, Any]) -> dict[str, str]:
    """Return the cells that the terminal shows, as text."""
    shown = {name: value for name, value in row.items() if name in ("job", "overrides", "result", "seconds", "status")}
    shown |= {name: value for name, value in row.items() if name in ("seeds", "mean", "std")}
    if row.get("error"):
        shown["status"] += f": {row['error'][:_ERROR]}"
    return {name: f"{value:.4f}" if isinstance(value, float) else str(value or "") for name, value in shown.items()}


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
