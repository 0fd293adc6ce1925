"""The curves of runs, their speed and memory, as Plotly figures."""

from typing import TYPE_CHECKING

from src.report.comparison import comparison_figure
from src.report.page import new_figure, number, series_color
from src.report.run_folder import RunFolder

if TYPE_CHECKING:
    import plotly.graph_objects as go

LEGEND = {"orientation": "h", "x": 0.5, "xanchor": "center", "y": 1.01, "yanchor": "bottom"}
_PANELS = [  # (number of the axis, part of the width, metric, title)
    ("", [0.0, 0.47], "throughput/samples_per_sec", "images per second, on CPU cores"),
    ("2", [0.53, 1.0], "throughput/peak_memory_mib", "peak memory of a process, MiB"),
]


def curves_figure(runs: list[RunFolder], names: list[str]) -> "go.Figure":
    """Return the training loss of runs upon each other, and their differences from the first one."""
    figure = comparison_figure("train/loss", runs, names, height=620)
    figure.update_layout(legend=LEGEND | {"font": {"size": 12, "color": "var(--ink)"}})
    figure.update_layout(xaxis={"title": "optimizer step"}, yaxis={"title": "training loss"})
    return figure


def speed_figure(runs: list[RunFolder], names: list[str]) -> "go.Figure":
    """Return bars of the throughput, and of the peak memory of the rank that needs most."""
    figure = new_figure(90 + 34 * len(runs), bargap=0.35, showlegend=False)
    for axis, domain, metric, title in _PANELS:
        values = [float(run.curves[metric].finite().max()) for run in runs]  # disturbed least by other programs
        _add_bars(figure, values, names, f"x{axis}")
        settings = {"title": title, "domain": domain, "range": [0, 1.2 * max(values)]}
        figure.update_layout({f"xaxis{axis}": settings})
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category", tickfont={"color": "var(--ink)"})
    return figure


def _add_bars(figure: "go.Figure", values: list[float], names: list[str], axis: str) -> None:
    colors = [series_color(index) for index in range(len(names))]
    figure.add_bar(
        x=values,
        y=names,
        xaxis=axis,
        orientation="h",
        marker={"color": colors, "cornerradius": 3},
        text=[number(value) for value in values],
        textposition="outside",
        textfont={"color": "var(--ink)"},
    )
