"""The comparison of several runs: their curves upon each other, and below them the difference from the first run."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from src.engine.report.agreement import difference, verdicts
from src.engine.report.metric_charts import downsample, median, style_value_axis, title
from src.engine.report.page import (
    Section,
    chart,
    macros,
    new_figure,
    parts,
    series_color,
    write_page,
)
from src.engine.report.run_folder import Curve, Floats, RunFolder

if TYPE_CHECKING:
    import plotly.graph_objects as go

SAME = 1e-9  # relative difference up to which two curves in float64 are the same
_EXACT = 1e-17  # where the axis shows a difference of zero, below the rounding of float64
_TICKS = (-15, -12, -9, -6, -3, 0)  # powers of ten of the axis of differences
_COMPARED = ("train/loss", "val/loss", "val/acc")


def write_comparison(runs: list[RunFolder], file: Path, scripts: Path | None) -> Path:
    """Write the comparison of several runs with the first one. `scripts` is that of `write_page`."""
    names = labels(runs)
    compared = [metric for metric in _COMPARED if all(metric in run.curves for run in runs)]
    charts = []
    for metric in compared:
        is_first = metric == compared[0]
        figure = comparison_figure(metric, runs, names, 560 if is_first else 440)
        charts.append(chart(figure, f"{title(metric.rpartition('/')[2])}: {metric}", wide=is_first))
    page = macros("comparison")
    sections = [
        Section(
            "Curves and differences",
            parts.grid(charts).strip() or parts.muted("The runs have no metric in common."),
            "Each curve is narrower than the one before it, so that equal curves lie visibly on each other. "
            "In float64 the difference stays below the line, on any hardware; in float32 rounding makes it grow, "
            "up to the noise of two seeds.",
        ),
        Section("Runs", parts.grid([parts.card("", _run_table(runs, names), wide=True)])),
    ]
    return write_page(file, "Comparison", f"{len(runs)} runs", page.verdicts(verdicts(runs, names)), sections, scripts)


def labels(runs: list[RunFolder]) -> list[str]:
    """Return a label of each run: strategy and number of processes if these differ, otherwise name or path."""
    common = Path(os.path.commonpath([run.path.parent for run in runs]))
    choices = [
        [f"{run.strategy} × {run.world_size}" for run in runs if run.world_size],
        [run.name for run in runs],
        [str(run.path.relative_to(common)) for run in runs],
    ]
    return next((names for names in choices if len(set(names)) == len(runs)), choices[-1])


def _largest(curve: Curve, first: Curve) -> float | None:
    gaps = difference(curve, first).finite()
    return float(gaps.max()) if len(gaps) else None


def _run_table(runs: list[RunFolder], names: list[str]) -> Markup:
    rows: list[list[Any]] = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        label = macros("comparison").run(name, series_color(index))
        both = "train/loss" in run.curves and "train/loss" in runs[0].curves
        gap = _largest(run.curves["train/loss"], runs[0].curves["train/loss"]) if both else None
        last = [float(run.curves[name].values[-1]) if name in run.curves else None for name in ("val/acc", "test/acc")]
        speed, memory = (median(run.curves, f"throughput/{key}") for key in ("samples_per_sec", "peak_memory_mib"))
        rows.append([label, run.name, run.experiment or "–", gap, *last, speed, memory])
    columns = ["run", "folder", "experiment", "largest difference", "val/acc", "test/acc", "images per second"]
    return parts.table([*columns, "memory, MiB"], rows, sortable=True)


def comparison_figure(metric: str, runs: list[RunFolder], names: list[str], height: int) -> "go.Figure":
    """Return the curves of a metric that all runs have, and below them their relative differences from the first."""
    figure = new_figure(height)
    step = min(2.4, 12 / len(runs))  # pixels by which a curve is narrower than the one before it
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        curve = downsample(run.curves[metric])
        width = 1.6 + step * (len(runs) - 1 - index)
        style = {"line": {"color": series_color(index), "width": width}, "marker": {"size": width + 5}}
        mode = "lines" if len(curve.values) > 1 else "markers"
        figure.add_scatter(x=curve.steps, y=curve.values, name=name, mode=mode, **style)
    gaps = [difference(run.curves[metric], runs[0].curves[metric]) for run in runs[1:]]
    for index, (gap, name) in enumerate(zip(gaps, names[1:], strict=True), 1):
        _add_difference(figure, gap, name, series_color(index))
    figure.update_layout(xaxis={"anchor": "y2", "title": "step"})
    figure.update_layout(yaxis={"domain": [0.5, 1], "title": metric}, yaxis2=_difference_axis(gaps))
    style_value_axis(figure, metric, [run.curves[metric] for run in runs])
    _mark_same(figure)
    return figure


def _add_difference(figure: "go.Figure", gap: Curve, name: str, color: str) -> None:
    shown = downsample(gap)
    values = np.where(shown.values == 0, _EXACT, shown.values)
    figure.add_scatter(
        x=shown.steps,
        y=values,
        customdata=shown.values,
        yaxis="y2",
        name=name,
        showlegend=False,
        mode="lines+markers" if len(values) < 60 else "lines",
        line={"color": color, "width": 1.4},
        marker={"color": color, "size": 5},
        hovertemplate="%{customdata:.2e}",
    )


def _difference_axis(gaps: list[Curve]) -> dict[str, Any]:
    """Return the axis of the differences: from zero, which stands below the smallest number, past the largest one."""
    finite: list[Floats] = [gap.finite() for gap in gaps if len(gap.finite())]
    highest = max([1e-7, *(float(values.max()) * 10 for values in finite)])
    return {
        "domain": [0, 0.42],
        "type": "log",
        "range": [np.log10(_EXACT) - 0.6, np.log10(highest)],
        "tickvals": [_EXACT, *(10.0**power for power in _TICKS)],
        "ticktext": ["equal", *(f"10<sup>{power}</sup>" if power else "1" for power in _TICKS)],
        "tickfont": {"size": 11},
        "title": "relative difference",
    }


def _mark_same(figure: "go.Figure") -> None:
    """Draw the line below which two curves in float64 are the same, and shade what is below it."""
    across = {"xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "layer": "below"}
    figure.add_shape(**across, y0=_EXACT / 4, y1=SAME, fillcolor="var(--band)", line={"width": 0})
    figure.add_shape(**across, y0=SAME, y1=SAME, line={"color": "var(--good)", "width": 1.5})
    label = {"text": "10<sup>−9</sup>: the same curve below", "font": {"size": 11, "color": "var(--good)"}}
    figure.add_annotation(label, xref="paper", x=1, yref="y2", y=np.log10(SAME), xanchor="right", yanchor="bottom")
    figure.update_annotations(showarrow=False)
