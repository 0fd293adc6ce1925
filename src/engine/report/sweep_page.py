"""The page of a sweep."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from src.engine.report.page import Section, duration_text, macros, number, parts, write_page
from src.engine.report.run_page import REPORT
from src.engine.report.sweep import Sweep, curves, seeds

_COLORS = {"finished": "good", "failed": "bad", "killed": "bad", "stopped": "warn"}
_SHOWN = ("val/acc", "test/acc", "train/loss")  # metrics that the table shows besides the optimized one


def write_sweep_page(folder: Path, scripts: Path | None) -> Path:
    """Write the page of the sweep in `folder`; return its path. `scripts` is that of `write_page`."""
    sweep = Sweep(folder)
    sections = [
        Section("Jobs", parts.grid([_job_table(sweep)]), "A click on a column sorts the table."),
        Section("Curves", parts.grid([curves(sweep)])),
        Section("Seeds", parts.grid([seeds(sweep)])),
        Section("Failures", parts.grid([macros("sweep").failures(sweep.jobs)])),
    ]
    return write_page(sweep.path / REPORT, "Sweep", sweep.path.name, _lead(sweep), sections, scripts)


def _lead(sweep: Sweep) -> Markup:
    statuses = Counter(job.status for job in sweep.jobs)
    best = sweep.ranked[-1] if sweep.ranked else None
    return macros("sweep").lead(statuses, _COLORS, best, list(_key_figures(sweep)))


def _key_figures(sweep: Sweep) -> Iterable[tuple[str, str, str]]:
    yield "Jobs", str(len(sweep.jobs)), ""
    if ranked := sweep.ranked:
        yield f"Best {sweep.metric}", number(ranked[-1].job.result), f"job {ranked[-1].name}"
        yield f"Median {sweep.metric}", number(median(job.job.result or 0.0 for job in ranked)), ""
    yield "Time of all jobs", duration_text(sum(job.job.seconds for job in sweep.jobs)), ""


def _job_table(sweep: Sweep) -> Markup:
    page = macros("sweep")
    metrics = [name for name in _SHOWN if name != sweep.metric and any(name in job.job.metrics for job in sweep.jobs)]
    rows = [
        [
            page.job_link(job.name, REPORT if (sweep.path / job.name / REPORT).is_file() else ""),
            *(_value(job.options.get(option)) for option in sweep.options),
            job.job.result,
            *(job.job.metrics.get(name) for name in metrics),
            round(job.job.seconds, 1),
            page.status(_COLORS.get(job.status, ""), job.status),
        ]
        for job in sweep.jobs
    ]
    columns = ["job", *sweep.options, sweep.metric, *metrics, "seconds", "status"]
    return parts.card("", parts.table(columns, rows, sortable=True), wide=True)


def _value(value: str | None) -> Any:
    """Return the value of an option, as a number if it is one."""
    try:
        return float(value) if value is not None else None
    except ValueError:
        return value
