"""The page of a sweep: the jobs, their options and results, and charts of them."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from src.engine.report.metric_charts import downsample, style_value_axis
from src.engine.report.page import Section, chart, duration_text, macros, new_figure, parts, write_page
from src.engine.report.run_folder import read_mapping, read_metrics
from src.engine.report.run_page import REPORT
from src.engine.state.jobs import Job, differing_overrides, read_jobs, seed_rows

_COLORS = {"finished": "good", "failed": "bad", "killed": "bad", "stopped": "warn"}
_SHOWN = ("val/acc", "test/acc", "train/loss")  # metrics that the table shows besides the optimized one
_CURVE_POINTS = 200  # buckets of the curve of a job


@dataclass
class SweepJob:
    """A job with its folder's name, and the values of the options in which the jobs differ."""

    name: str
    job: Job
    options: dict[str, str]

    @property
    def status(self) -> str:
        return "killed" if self.job.status == "running" else self.job.status

    @property
    def chosen(self) -> str:
        """The differing options as on a command line."""
        return " ".join(f"{name}={value}" for name, value in self.options.items())


class Sweep:
    """A sweep folder; its jobs are in the order of their numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        named = list(read_jobs(self.path))
        differing = differing_overrides([job.overrides for _, job in named])
        names = {_split(word)[0] for words in differing for word in words}
        self.jobs = [SweepJob(name, job, _options(job.overrides, names)) for name, job in named]
        self.metric = next((job.metric for _, job in named if job.metric), "result")
        saved = read_mapping(self.path / "multirun.yaml").get("hydra", {}).get("sweeper") or {}
        direction = saved.get("direction") or ("minimize" if self.metric.endswith("loss") else "maximize")
        self.falls = direction == "minimize"  # the lowest result is the best

    @property
    def options(self) -> list[str]:
        """The options in which the jobs differ, the seed last."""
        names = dict.fromkeys(name for job in self.jobs for name in job.options)
        return sorted(names, key=lambda name: name == "seed")

    @property
    def ranked(self) -> list[SweepJob]:
        """The jobs that have a result, the best one last."""
        with_result = [job for job in self.jobs if job.job.result is not None and np.isfinite(job.job.result)]
        return sorted(with_result, key=lambda job: job.job.result or 0.0, reverse=self.falls)


def _options(overrides: list[str], names: set[str]) -> dict[str, str]:
    """Return the values of the named options; of an option that is given twice, the last one."""
    return {name: value for name, value in map(_split, overrides) if name in names}


def _split(override: str) -> tuple[str, str]:
    name, _, value = override.partition("=")
    return name.lstrip("+~"), value


def write_sweep_page(folder: Path, scripts: Path | None) -> Path:
    """Write the page of the sweep in `folder`; return its path. `scripts` is that of `write_page`."""
    sweep = Sweep(folder)
    sections = [
        Section("Jobs", parts.grid([_job_table(sweep)]), "A click on a column sorts the table."),
        Section("Curves", parts.grid([_curves(sweep)])),
        Section("Seeds", parts.grid([_seeds(sweep)])),
        Section("Failures", parts.grid([macros("sweep").failures(sweep.jobs)])),
    ]
    return write_page(sweep.path / REPORT, "Sweep", sweep.path.name, _lead(sweep), sections, scripts)


def _lead(sweep: Sweep) -> Markup:
    statuses = Counter(job.status for job in sweep.jobs)
    best = sweep.ranked[-1] if sweep.ranked else None
    duration = duration_text(sum(job.job.seconds for job in sweep.jobs))
    return macros("sweep").lead(statuses, _COLORS, best, sweep.metric, duration)


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


def _seeds(sweep: Sweep) -> Markup:
    """Return mean and standard deviation of the jobs that differ only in the seed."""
    overrides = [[f"{name}={value}" for name, value in job.options.items()] for job in sweep.jobs]
    rows = [list(row.values()) for row in seed_rows([job.job for job in sweep.jobs], overrides, sweep.metric)]
    if not rows:
        return Markup()
    rows.sort(key=lambda row: row[2], reverse=not sweep.falls)
    rows = [[options or "all jobs", *numbers] for options, *numbers in rows]
    table = parts.table(["options", "seeds", "mean", "standard deviation"], rows)
    return parts.card(f"Mean and standard deviation of {sweep.metric}, the best first", table, wide=True)


def _curves(sweep: Sweep) -> Markup:
    """Return the curve of the metric in each job, the best one in a color of its own."""
    figure, drawn, ranked = new_figure(320, hovermode="closest"), [], sweep.ranked
    for job in ranked:
        curve = read_metrics(sweep.path / job.name / "metrics.csv").get(sweep.metric)
        if curve is None or len(curve.values) < 2:
            continue
        drawn.append(curve)
        is_best = job is ranked[-1]
        shown = downsample(curve, _CURVE_POINTS)
        figure.add_scatter(
            x=shown.steps,
            y=shown.values,
            mode="lines",
            name="best job" if is_best else "other jobs",
            line={"color": "var(--s2)", "width": 2.2} if is_best else {"color": "var(--s9)", "width": 1.3},
            hovertemplate=f"job {job.name}, step %{{x}}: %{{y:.4g}}<extra></extra>",
        )
    if not drawn:
        return Markup()
    figure.update_xaxes(title="step")
    style_value_axis(figure, sweep.metric, drawn)
    return chart(figure, f"{sweep.metric} of each job")
