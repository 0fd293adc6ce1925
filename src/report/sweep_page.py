"""The page of a sweep."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from src.report.jobs import last_line
from src.report.markup import Html, Markup, Section, card, details, duration_text, grid, number, table, text, tiles
from src.report.optuna_plots import is_optuna, optuna_plots
from src.report.page import write_page
from src.report.run_page import REPORT
from src.report.sweep import Sweep, SweepJob
from src.report.sweep_charts import curves, importance, parallel_coordinates, seeds

_COLORS = {"finished": "good", "failed": "bad", "killed": "bad", "stopped": "warn"}
_SHOWN = ("val/acc", "test/acc", "train/loss")  # metrics that the table shows besides the optimized one


def write_sweep_page(folder: Path, scripts: Path | None) -> Path:
    """Write the page of the sweep in `folder`; return its path. `scripts` is that of `write_page`."""
    sweep = Sweep(folder)
    charts = [parallel_coordinates(sweep), curves(sweep), *_importance(sweep)]
    sections = [
        Section("Jobs", grid([card("", _job_table(sweep), wide=True)]), "A click on a column sorts the table."),
        Section("Options and results", grid(charts)),
        Section("Seeds", grid([seeds(sweep)])),
        Section("Failures", _failures(sweep)),
    ]
    file = sweep.path / REPORT
    write_page(file, "Sweep", sweep.path.name, _lead(sweep), sections, scripts)
    return file


def _importance(sweep: Sweep) -> list[Html]:
    if not is_optuna(sweep):
        return [importance(sweep)]
    try:
        return optuna_plots(sweep)
    except Exception as error:  # a storage raises errors of its own library
        return [card("Optuna", f"<p>The study cannot be read: {text(last_line(str(error)))}</p>")]


def _lead(sweep: Sweep) -> Html:
    statuses = Counter(job.status for job in sweep.jobs)
    pills = [
        f'<span class="pill {_COLORS.get(status, "")}">{count} {text(status)}</span>'
        for status, count in statuses.items()
    ]
    best = ""
    if sweep.ranked:
        chosen = " ".join(f"{name}={value}" for name, value in sweep.ranked[-1].options.items())
        best = f'<p class="lead">The best is job {text(sweep.ranked[-1].name)}: <code>{text(chosen)}</code></p>'
    return f"<p>{' '.join(pills)}</p>{best}{tiles(_key_figures(sweep))}"


def _key_figures(sweep: Sweep) -> Iterable[tuple[str, str, str]]:
    yield "Jobs", str(len(sweep.jobs)), ""
    if ranked := sweep.ranked:
        yield f"Best {sweep.metric}", number(ranked[-1].job.result), f"job {ranked[-1].name}"
        yield f"Median {sweep.metric}", number(median(job.job.result or 0.0 for job in ranked)), ""
    yield "Time of all jobs", duration_text(sum(job.job.seconds for job in sweep.jobs)), ""


def _job_table(sweep: Sweep) -> Html:
    metrics = [name for name in _SHOWN if name != sweep.metric and any(name in job.job.metrics for job in sweep.jobs)]
    rows = [
        [
            _link(sweep, job),
            *(_value(job.options.get(option)) for option in sweep.options),
            job.job.result,
            *(job.job.metrics.get(name) for name in metrics),
            round(job.job.seconds, 1),
            Markup(f'<span class="{_COLORS.get(job.status, "")}">{text(job.status)}</span>'),
        ]
        for job in sweep.jobs
    ]
    return table(["job", *sweep.options, sweep.metric, *metrics, "seconds", "status"], rows, sortable=True)


def _link(sweep: Sweep, job: SweepJob) -> Markup:
    has_page = (sweep.path / job.name / REPORT).is_file()
    return Markup(f'<a href="{quote(job.name)}/{REPORT}">{text(job.name)}</a>' if has_page else text(job.name))


def _value(value: str | None) -> Any:
    """Return the value of an option, as a number if it is one."""
    try:
        return float(value) if value is not None else None
    except ValueError:
        return value


def _failures(sweep: Sweep) -> Html:
    failed = [job for job in sweep.jobs if job.job.error]
    parts = []
    for job in failed:
        chosen = " ".join(f"{name}={value}" for name, value in job.options.items())
        body = f'<p><code>{text(chosen)}</code></p><p><span class="bad">{text(last_line(job.job.error))}</span></p>'
        if "\n" in job.job.error.strip():
            body += details("Traceback", f"<pre>{text(job.job.error)}</pre>")
        parts.append(card(f"Job {job.name}", body, wide=True))
    return grid(parts)
