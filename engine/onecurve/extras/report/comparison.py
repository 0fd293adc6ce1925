"""The comparison of several runs: their curves upon each other, and below them the difference from the first run."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from onecurve.extras.report.agreement import difference, shared_metrics, verdicts
from onecurve.extras.report.metric_charts import downsample, median, style_value_axis
from onecurve.extras.report.page import Figure, Section, chart, macros, new_figure, parts, series_color, write_page
from onecurve.extras.report.run_folder import Curve, RunFolder

SAME = 1e-9  # relative difference up to which two curves in float64 are the same
_EXACT = 1e-17  # where the axis shows a difference of zero, below the rounding of float64
_COMPARED = ("train/loss", "val/loss", "val/acc")


def write_comparison(runs: list[RunFolder], file: Path, scripts: Path | None) -> Path:
    """Write the comparison of several runs with the first one. `scripts` is that of `write_page`."""
    names = labels(runs)
    compared = [metric for metric in _COMPARED if all(metric in run.curves for run in runs)] or shared_metrics(runs)[:3]
    charts = [chart(comparison_figure(metric, runs, names, 500), metric, wide=True) for metric in compared]
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


def _run_table(runs: list[RunFolder], names: list[str]) -> Markup:
    rows: list[list[Any]] = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        label = macros("comparison").run(name, series_color(index))
        both = [one.curves["train/loss"] for one in (run, runs[0]) if "train/loss" in one.curves]
        gaps = difference(*both).finite() if len(both) == 2 else ()
        last = [float(run.curves[name].values[-1]) if name in run.curves else None for name in ("val/acc", "test/acc")]
        speed, memory = run.speeds.get(run.world_size), median(run.curves, "throughput/peak_memory_mib")
        rows.append([label, run.name, run.experiment or "–", max(map(float, gaps), default=None), *last, speed, memory])
    columns = ["run", "folder", "experiment", "largest difference", "val/acc", "test/acc", "samples per second"]
    return parts.table([*columns, "memory, MiB"], rows, sortable=True)


def comparison_figure(metric: str, runs: list[RunFolder], names: list[str], height: int) -> Figure:
    """Return the curves of a metric that all runs have, and below them their relative differences from the first."""
    figure = new_figure(height)
    step = min(2.4, 12 / len(runs))  # pixels by which a curve is narrower than the one before it
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        curve = downsample(run.curves[metric])
        width = 1.6 + step * (len(runs) - 1 - index)
        style = {"line": {"color": series_color(index), "width": width}, "marker": {"size": width + 5}}
        mode = "lines" if len(curve.values) > 1 else "markers"
        figure.add_scatter(x=curve.steps, y=curve.values, name=name, mode=mode, **style)
        if index:
            _add_difference(figure, difference(run.curves[metric], runs[0].curves[metric]), name, series_color(index))
    figure.update_layout(xaxis={"anchor": "y2", "title": "step"}, yaxis={"domain": [0.5, 1], "title": metric})
    axis = {"type": "log", "dtick": 3, "exponentformat": "power", "tickfont": {"size": 11}}
    figure.update_layout(yaxis2=axis | {"domain": [0, 0.42], "title": "relative difference"})
    style_value_axis(figure, metric, [run.curves[metric] for run in runs])
    _mark_same(figure)
    return figure


def _add_difference(figure: Figure, gap: Curve, name: str, color: str) -> None:
    shown = downsample(gap)
    mode = "lines+markers" if len(shown.values) < 60 else "lines"
    style = {"line": {"color": color, "width": 1.4}, "marker": {"color": color, "size": 5}, "hovertemplate": "%{y:.2e}"}
    y = np.maximum(shown.values, _EXACT)
    figure.add_scatter(x=shown.steps, y=y, yaxis="y2", name=name, showlegend=False, mode=mode, **style)


def _mark_same(figure: Figure) -> None:
    """Draw the line below which two curves in float64 are the same, and shade what is below it."""
    across = {"xref": "paper", "x0": 0, "x1": 1, "yref": "y2", "layer": "below"}
    figure.add_shape(**across, y0=_EXACT / 4, y1=SAME, fillcolor="var(--band)", line={"width": 0})
    figure.add_shape(**across, y0=SAME, y1=SAME, line={"color": "var(--good)", "width": 1.5})
    label = {"text": "10<sup>−9</sup>: the same curve below", "font": {"size": 11, "color": "var(--good)"}}
    figure.add_annotation(label, xref="paper", x=1, yref="y2", y=np.log10(SAME), xanchor="right", yanchor="bottom")
    figure.update_annotations(showarrow=False)
