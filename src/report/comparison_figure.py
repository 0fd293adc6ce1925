"""The figure of a comparison: the curves of several runs upon each other, and below them their differences."""

from typing import TYPE_CHECKING, Any

import numpy as np

from src.report.agreement import difference
from src.report.curves import style_value_axis
from src.report.figure import new_figure
from src.report.files import Curve, Floats
from src.report.markup import series_color
from src.report.run_folder import RunFolder
from src.report.sampling import downsample

if TYPE_CHECKING:
    import plotly.graph_objects as go

SAME = 1e-9  # relative difference up to which two curves in float64 are the same
_EXACT = 1e-17  # where the axis shows a difference of zero, below the rounding of float64
_TICKS = (-15, -12, -9, -6, -3, 0)  # powers of ten of the axis of differences


def comparison_figure(metric: str, runs: list[RunFolder], names: list[str], height: int) -> "go.Figure":
    """Return the curves of one metric, and their relative differences from the first run below them.

    Args:
        metric: a column of metrics.csv that all runs have.
        runs: the runs.
        names: their names in the legend.
        height: in pixels.
    """
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
    figure.add_annotation(
        xref="paper",
        x=1,
        yref="y2",
        y=np.log10(SAME),
        xanchor="right",
        yanchor="bottom",
        text="10<sup>−9</sup>: the same curve below",
        font={"size": 11, "color": "var(--good)"},
        showarrow=False,
    )
