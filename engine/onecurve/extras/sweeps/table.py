"""Result tables of a sweep: its jobs, and the means over seeds, on the terminal and as CSV files."""

import csv
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onecurve.extras.jobs import DONE, Job, Sweep
from onecurve.records.files import atomic_write

_MAX_ERROR_LENGTH = 80  # characters of a job's error that the table shows


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
    cells = {
        "job": name,
        "overrides": " ".join(overrides),
        metric: job.result,
        "seconds": f"{job.seconds:.1f}",
        "status": job.end,
        "error": "".join(job.error.strip().splitlines()[-1:]),  # of a traceback: the exception
    }
    return cells | job.metrics


def _print(title: str, rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Print a table; the last column also shows the error of a job."""
    table = Table(*columns, title=title)
    for row in rows:
        cells = [f"{row[name]:.4f}" if isinstance(row[name], float) else str(row[name] or "") for name in columns]
        if row.get("error"):
            cells[-1] += f": {row['error'][:_MAX_ERROR_LENGTH]}"
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _write(file: Path, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with atomic_write(file) as temporary, temporary.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)
