"""The pictures as Plotly figures: the curves of runs, their differences, and the passes of each pipeline schedule."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from onecurve.extras.report.agreement import difference
from onecurve.extras.report.comparison import comparison_figure
from onecurve.extras.report.page import new_figure, series_color
from onecurve.extras.report.passes import Step, draw_passes, fastest_step
from onecurve.extras.report.run_folder import RunFolder
from onecurve.extras.report.simulation import bubble, duration, order_of_passes, simulate
from onecurve.parallel.pipeline.schedules import SCHEDULES

if TYPE_CHECKING:
    import plotly.graph_objects as go

_LEGEND = {"orientation": "h", "x": 0.5, "xanchor": "center", "y": 1.01, "yanchor": "bottom"}
_ROW, _TITLE, _MARGIN = 20, 22, 60  # pixels: of a rank, of a panel's title, and of the figure for the legend


class _Panel(NamedTuple):
    """One step: its title, passes, the factor from their times to the unit of the axis, and the length of the axis."""

    title: str
    step: Step
    scale: float
    length: float


def curves_figure(runs: list[RunFolder], names: list[str]) -> "go.Figure":
    """Return the training loss of runs upon each other, and their differences from the first one."""
    figure = comparison_figure("train/loss", runs, names, height=620)
    figure.update_layout(legend=_LEGEND | {"font": {"size": 12, "color": "var(--ink)"}})
    figure.update_layout(xaxis={"title": "optimizer step"}, yaxis={"title": "training loss"})
    return figure


def bits_figure(together: list[RunFolder], one_by_one: list[RunFolder], names: list[str]) -> "go.Figure":
    """Return the relative differences of the training loss from that of the first run, in both ways.

    A difference of zero is not drawn: a logarithmic axis has none.
    """
    figure = new_figure(420)
    for runs, axis in ((together, "y"), (one_by_one, "y2")):
        zeros, count = 0, 0
        for index, run in enumerate(runs[1:], start=1):
            gap = difference(run.curves["train/loss"], runs[0].curves["train/loss"])
            zeros, count = zeros + int((gap.values == 0).sum()), count + len(gap.values)
            drawn = np.where(gap.values > 0, gap.values, np.nan)
            style = {"name": names[index], "line": {"color": series_color(index), "width": 1.6}}
            figure.add_scatter(x=gap.steps, y=drawn, yaxis=axis, mode="lines", showlegend=axis == "y", **style)
        note = {"text": f"{zeros} of {count} differences are zero", "xref": "paper", "x": 1, "xanchor": "right"}
        figure.add_annotation(note, yref=axis, y=-7.5, showarrow=False, font={"size": 12, "color": "var(--ink)"})
    scale = {"type": "log", "range": [-8, 0], "dtick": 2, "exponentformat": "power"}
    figure.update_layout(
        legend=_LEGEND, xaxis={"title": "optimizer step", "anchor": "y2", "range": [0, len(gap.steps)]}
    )
    figure.update_layout(yaxis=scale | {"domain": [0.56, 1], "title": "together"})
    figure.update_layout(yaxis2=scale | {"domain": [0, 0.44], "title": "bit_exact=true"})
    return figure


def schedules_figure(runs: dict[str, RunFolder], ranks: int, microbatches: int) -> "go.Figure":
    """Return the passes of each schedule: simulated, and below as recorded by its run.

    All simulated steps have one time axis, on which a rank's forward pass of a micro-batch through all of its stages
    takes one unit. Each recorded step has its own, because the ranks share the processors.
    """
    panels = []
    simulations = {name: simulate(name, ranks, microbatches) for name in runs}
    longest = max(duration(step) / _stages(name) for name, step in simulations.items())
    for name, run in runs.items():
        simulated, recorded = simulations[name], fastest_step(run.path, order_of_passes(name, ranks, microbatches))
        title = f"<b>{name}</b>, simulated: the ranks idle {bubble(simulated):.1%} of the step"
        panels.append(_Panel(title, simulated, 1 / _stages(name), longest))
        milliseconds = 1000 * duration(recorded)
        title = f"recorded, {milliseconds:,.0f} ms: the ranks idle {bubble(recorded):.1%}"
        panels.append(_Panel(title, recorded, 1000.0, milliseconds))
    return _stack(panels, ranks)


def _stages(schedule: str) -> int:
    return SCHEDULES[schedule].stages_per_rank


def _stack(panels: list[_Panel], ranks: int) -> "go.Figure":
    """Return the panels below each other."""
    each = ranks * _ROW + _TITLE
    height = len(panels) * each
    figure = new_figure(height + _MARGIN, barmode="overlay", bargap=0.14, uniformtext={"minsize": 9, "mode": "hide"})
    for index, panel in enumerate(panels):
        bottom = (len(panels) - 1 - index) * each
        axis = str(index + 1) if index else ""
        _add_panel(figure, panel, axis, [bottom / height, (bottom + ranks * _ROW) / height])
    _show_each_name_once(figure)
    figure.update_layout(legend=_LEGEND)
    return figure


def _add_panel(figure: "go.Figure", panel: _Panel, axis: str, domain: list[float]) -> None:
    draw_passes(figure, panel.step, panel.scale, axis=axis)
    time = {"range": [0, panel.length], "anchor": f"y{axis}", "showgrid": False, "showticklabels": False}
    rank = {"domain": domain, "anchor": f"x{axis}", "showgrid": False, "type": "category", "autorange": "reversed"}
    figure.update_layout({f"xaxis{axis}": time, f"yaxis{axis}": rank | {"tickfont": {"size": 9}}})
    note = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": domain[1], "yanchor": "bottom"}
    figure.add_annotation(note, text=panel.title, showarrow=False, font={"size": 12, "color": "var(--ink)"})


def _show_each_name_once(figure: "go.Figure") -> None:
    seen: set[str] = set()
    for trace in figure.data:
        trace.showlegend = trace.name not in seen
        seen.add(trace.name)
