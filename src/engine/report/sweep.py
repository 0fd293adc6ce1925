"""A sweep as its page shows it: the jobs, their options and results, and charts of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from src.engine.report.metric_charts import downsample, is_wide, style_value_axis, title
from src.engine.report.page import chart, new_figure, number, parts
from src.engine.report.run_folder import Floats, read_mapping, read_metrics
from src.engine.state.jobs import Job, differing_overrides, read_jobs, seed_rows

if TYPE_CHECKING:
    import plotly.graph_objects as go

_LEVEL_NAMES = ("worst quarter", "third quarter", "second quarter", "best quarter")
_LEVEL_COLORS = ("var(--s9)", "var(--s7)", "var(--s3)", "var(--s2)")
_MOST_TICKS = 8
_MOST_LETTERS = 20  # of a tick, beside which the next axis stands
_CURVE_POINTS = 200  # buckets of the curve of a job
LEVELS = 4  # quarters of the jobs, by their results


@dataclass
class SweepJob:
    """A job with its folder's name, and the values of the options in which the jobs differ."""

    name: str
    job: Job
    options: dict[str, str]
    level: int = 0  # the quarter of the result, LEVELS - 1 for the best; 0 without a result

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
        # What Hydra has saved of the sweeper, such as Optuna's direction and storage.
        self.sweeper: dict[str, Any] = read_mapping(self.path / "multirun.yaml").get("hydra", {}).get("sweeper") or {}
        for position, ranked in enumerate(self.ranked):
            ranked.level = LEVELS * position // len(self.ranked) if len(self.ranked) >= LEVELS else LEVELS - 1

    @property
    def options(self) -> list[str]:
        """The options in which the jobs differ, the seed last."""
        names = dict.fromkeys(name for job in self.jobs for name in job.options)
        return sorted(names, key=lambda name: name == "seed")

    @property
    def falls(self) -> bool:
        """Whether the lowest result is the best."""
        return self.sweeper.get("direction") == "minimize" or (
            "direction" not in self.sweeper and self.metric.endswith("loss")
        )

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


def parallel_coordinates(sweep: Sweep) -> Markup:
    """Return a chart with an axis per option and one for the result; each line is a job."""
    jobs, options = sweep.ranked, sweep.options
    if len(jobs) < 2 or not options:
        return Markup()
    axes = [_axis([job.options.get(option, "") for job in jobs]) for option in options]
    axes.append(_axis([str(job.job.result) for job in jobs]))
    positions = np.array([axis[0] for axis in axes])  # (axes, jobs), from 0 to 1
    figure = new_figure(380, hovermode="closest")
    for level in range(LEVELS):
        chosen = [index for index, job in enumerate(jobs) if job.level == level]
        if chosen:
            _add_lines(figure, level, [jobs[index] for index in chosen], positions[:, chosen], sweep.metric)
    tick = {"xanchor": "right", "xshift": -5, "showarrow": False, "font": {"size": 11}, "bgcolor": "var(--card)"}
    for place, (_, ticks) in enumerate(axes):
        figure.add_shape(x0=place, x1=place, y0=0, y1=1, layer="below", line={"color": "var(--muted)", "width": 1})
        for position, label in ticks:
            figure.add_annotation(tick, x=place, y=position, text=label, borderpad=1)
    names = [*options, sweep.metric]
    figure.update_xaxes(tickvals=list(range(len(names))), ticktext=names, range=[-0.3, len(names) - 0.9])
    figure.update_layout(xaxis={"showgrid": False, "side": "top"}, yaxis={"visible": False, "range": [-0.08, 1.08]})
    return chart(figure, "Parallel coordinates", "Each line is a job.", wide=True, min_width=160 * len(names))


def _axis(values: list[str]) -> tuple[Floats, list[tuple[float, str]]]:
    """Return the position of each value from 0 to 1, and the ticks of the axis."""
    try:
        numbers = np.array([float(value) for value in values])
    except ValueError:
        return _categories(values)
    is_log = is_wide(numbers)
    scaled = np.log10(numbers) if is_log else numbers
    low, span = scaled.min(), float(np.ptp(scaled)) or 1.0
    distinct = np.unique(scaled)
    shown = distinct if len(distinct) <= _MOST_TICKS else np.linspace(low, low + span, 5)
    ticks = [(float((tick - low) / span), number(float(10**tick if is_log else tick))) for tick in shown]
    return (scaled - low) / span, ticks


def _categories(values: list[str]) -> tuple[Floats, list[tuple[float, str]]]:
    names = sorted(set(values))
    last = max(1, len(names) - 1)
    positions = np.array([names.index(value) / last for value in values])
    labels = [name if len(name) <= _MOST_LETTERS else f"{name[:_MOST_LETTERS]}…" for name in names]
    return positions, [(index / last, label or "–") for index, label in enumerate(labels)]


def _add_lines(figure: "go.Figure", level: int, jobs: list[SweepJob], positions: Floats, metric: str) -> None:
    """Add the lines of the jobs of one level, as one trace with gaps; positions: (axes, jobs)."""
    axes = len(positions)
    labels = [f"job {job.name}: {metric} {number(job.job.result)}" for job in jobs]
    figure.add_scatter(
        x=[*range(axes), None] * len(jobs),
        y=[y for column in positions.T.tolist() for y in (*column, None)],
        mode="lines+markers",
        name=_LEVEL_NAMES[level],
        line=_line(level),
        marker={"color": _LEVEL_COLORS[level], "size": 4},
        text=np.repeat(labels, axes + 1),
        hovertemplate="%{text}<extra></extra>",
    )


def _line(level: int) -> dict[str, Any]:
    return {"color": _LEVEL_COLORS[level], "width": 2.2 if level == LEVELS - 1 else 1.3}


def seeds(sweep: Sweep) -> Markup:
    """Return mean and standard deviation of the jobs that differ only in the seed."""
    overrides = [[f"{name}={value}" for name, value in job.options.items()] for job in sweep.jobs]
    rows = [list(row.values()) for row in seed_rows([job.job for job in sweep.jobs], overrides, sweep.metric)]
    if not rows:
        return Markup()
    rows.sort(key=lambda row: row[2], reverse=not sweep.falls)
    options, _, means, deviations = zip(*rows, strict=True)
    names = [name or "all jobs" for name in options]
    figure = new_figure(80 + 34 * len(rows), hovermode="closest")
    figure.add_scatter(
        x=means,
        y=names,
        mode="markers",
        marker={"color": "var(--s1)", "size": 9},
        error_x={"type": "data", "array": deviations, "color": "var(--s1)", "thickness": 1.5, "width": 5},
        customdata=[f"{number(mean)} ± {number(std)}, {count} seeds" for _, count, mean, std in rows],
        hovertemplate="%{customdata}<extra></extra>",
    )
    figure.update_xaxes(title=sweep.metric)
    figure.update_yaxes(autorange="reversed", type="category")
    numbers = parts.card("", parts.table(["options", "seeds", "mean", "standard deviation"], rows), wide=True)
    note = f"Mean and standard deviation of {sweep.metric}, the best first."
    return chart(figure, "Over seeds", note, wide=True, min_width=300 + 7 * max(map(len, names))) + numbers


def curves(sweep: Sweep) -> Markup:
    """Return the curve of the metric in each job, with the colors of the parallel coordinates."""
    figure, drawn = new_figure(320, hovermode="closest"), []
    for job in sweep.ranked:
        curve = read_metrics(sweep.path / job.name / "metrics.csv").get(sweep.metric)
        if curve is None or len(curve.values) < 2:
            continue
        drawn.append(curve)
        shown = downsample(curve, _CURVE_POINTS)
        figure.add_scatter(
            x=shown.steps,
            y=shown.values,
            mode="lines",
            name=_LEVEL_NAMES[job.level],
            line=_line(job.level),
            hovertemplate=f"job {job.name}, step %{{x}}: %{{y:.4g}}<extra></extra>",
        )
    if not figure.data:
        return Markup()
    figure.update_xaxes(title="step")
    style_value_axis(figure, sweep.metric, drawn)
    return chart(figure, f"{title(sweep.metric.rpartition('/')[2])} of each job", sweep.metric)
