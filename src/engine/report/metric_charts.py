"""Charts of the columns of metrics.csv: long curves with fewer points, and the events of the run as lines."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from src.engine.report.page import chart, new_figure, series_color
from src.engine.report.run_folder import Curve, Floats

if TYPE_CHECKING:
    import plotly.graph_objects as go

BUCKETS = 600  # of a long curve, each with its smallest and its largest value; a chart is some 600 pixels wide
_NOISY = 400  # points from which a curve is pale, with the mean of each of `_MEANS` sections upon it
_MEANS = 100
_WIDE_RANGE = 50  # largest value / smallest value from which an axis is logarithmic
_FLAT = 1e-6  # range / largest value up to which the values are the same for the eye
_FRACTIONS = ("acc", "val_class", "data_fraction", "gain", "mfu")  # last parts of the names of metrics from 0 to 1
_SPLITS = ("train", "val", "test")
_COLORS = {"train": "var(--s1)", "val": "var(--s2)", "test": "var(--s4)"}
_TITLES = {
    "loss": "Loss",
    "acc": "Accuracy",
    "lr": "Learning rate",
    "calibration_error": "Calibration error",
    "val_class": "Accuracy of each class, validation",
    "optim/grad_norm": "Gradient norm, before clipping",
    "throughput/samples_per_sec": "Images per second",
    "throughput/step_ms": "Step time, ms",
    "throughput/data_fraction": "Part of a step for data",
    "throughput/peak_memory_mib": "Peak memory, MiB",
    "throughput/mfu": "Model FLOPs utilization",
    "ranks/busy_ms": "Busy time of the ranks per step, ms",
    "ranks/gain": "Part of a step that a balanced load would save",
    "ranks/slowest": "Slowest rank",
    "ranks/memory_mib": "Memory of the ranks, MiB",
}
_EVENT_COLORS = {
    "resume": "var(--accent)",
    "restart": "var(--accent)",
    "stopped": "var(--warn)",
    "failed": "var(--bad)",
    "killed": "var(--bad)",
}


def title(metric: str) -> str:
    return _TITLES.get(metric, metric)


def median(curves: dict[str, Curve], name: str) -> float | None:
    values = curves[name].finite() if name in curves else ()
    return float(np.median(values)) if len(values) else None


def group_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return the metrics of each chart: the splits of a metric share one, and so do classes, maximum and minimum."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if name == "epoch":
            continue
        prefix, _, rest = name.partition("/")
        stem = prefix if prefix.endswith("_class") else rest if prefix in _SPLITS and rest else name
        for ending in ("_max", "_min", "_median"):
            stem = stem.removesuffix(ending)
        groups.setdefault("lr" if stem.startswith("lr-") else stem, []).append(name)
    return groups


def is_wide(values: Floats) -> bool:
    """Return whether a logarithmic axis shows the values better: all are positive and their range is wide."""
    finite = values[np.isfinite(values)]
    return len(finite) > 0 and bool(finite.min() > 0 and finite.max() / finite.min() > _WIDE_RANGE)


def metric_chart(metric: str, curves: dict[str, Curve], events: list[dict[str, Any]]) -> Markup:
    """Return the chart of one group of metrics, given as curves by name."""
    figure = new_figure(260)
    for index, (name, curve) in enumerate(curves.items()):
        _add_curve(figure, name, curve, _COLORS.get(name.partition("/")[0], series_color(index)))
    figure.update_xaxes(title="step", rangemode="tozero")
    style_value_axis(figure, metric, curves.values())
    mark_events(figure, events)
    return chart(figure, title(metric), _note(curves))


def style_value_axis(figure: "go.Figure", metric: str, curves: Iterable[Curve]) -> None:
    """Set the axis of a metric's values: in percent, from zero, or logarithmic; rounding errors do not fill it."""
    values = np.concatenate([curve.finite() for curve in curves])
    axis: dict[str, Any] = {}
    if metric.rpartition("/")[2] in _FRACTIONS:
        axis = {"tickformat": ".3~%", "hoverformat": ".2%", "rangemode": "tozero"}
    elif metric.startswith(("throughput/", "ranks/")):
        axis = {"rangemode": "tozero"}
    elif len(values) and np.ptp(values) < _FLAT * np.abs(values).max():
        axis = {"range": sorted((0.95 * values[0], 1.05 * values[0]))}
    elif metric != "lr" and is_wide(values):  # Plotly draws the powers larger than other ticks
        axis = {"type": "log", "dtick": 1, "exponentformat": "power", "tickfont": {"size": 10}}
    figure.update_layout(yaxis=axis)


def _add_curve(figure: "go.Figure", name: str, curve: Curve, color: str) -> None:
    shown = downsample(curve)
    is_noisy = len(curve.values) > _NOISY
    symbol, size = ("star", 11) if name.startswith("test/") else ("circle", 5)
    figure.add_scatter(
        x=shown.steps,
        y=shown.values,
        name=name,
        mode="markers" if len(shown.values) == 1 else "lines+markers" if len(shown.values) < 40 else "lines",
        opacity=0.35 if is_noisy else 1.0,
        line={"color": color, "width": 1.0 if is_noisy else 1.7},
        marker={"color": color, "symbol": symbol, "size": size},
        connectgaps=False,
        cliponaxis=False,  # a marker on the axis is drawn in full
    )
    if is_noisy:
        mean = means(curve, _MEANS)
        line = {"color": color, "width": 2.0}
        figure.add_scatter(x=mean.steps, y=mean.values, name=name, mode="lines", line=line, hoverinfo="skip")


def _note(curves: dict[str, Curve]) -> str:
    """Return the metric's name, and which points the chart leaves out because they are not finite."""
    parts = [] if len(curves) > 1 else [name for name in curves if title(name) != name]
    for name, curve in curves.items():
        finite = np.isfinite(curve.values)
        if not finite.all():
            first = int(curve.steps[~finite][0])
            parts.append(f"{name} is not finite at {int((~finite).sum())} points, first at step {first}")
    return "; ".join(parts)


def mark_events(figure: "go.Figure", events: list[dict[str, Any]]) -> None:
    """Draw a line at the step of each event between start and end; the section of the events names them."""
    for event in events:
        color = _EVENT_COLORS.get(event["event"])
        if color and event.get("step") is not None:
            figure.add_vline(event["step"], line={"color": color, "width": 1, "dash": "dot"})


def downsample(curve: Curve, buckets: int = BUCKETS) -> Curve:
    """Return the curve with the smallest and the largest value of each bucket, so that every spike stays visible.

    A curve of at most two points per bucket is returned as it is, but for infinite values, which become nan.
    """
    values = np.where(np.isfinite(curve.values), curve.values, np.nan)
    if len(values) <= 2 * buckets:
        return Curve(curve.steps, values)
    kept = {0, len(values) - 1}
    for bucket in _buckets(len(values), buckets):
        finite = bucket[np.isfinite(values[bucket])]
        kept |= {finite[values[finite].argmin()], finite[values[finite].argmax()]} if len(finite) else {bucket[0]}
    chosen = sorted(kept)
    return Curve(curve.steps[chosen], values[chosen])


def means(curve: Curve, buckets: int) -> Curve:
    """Return the mean step and the mean of the finite values of each bucket; nan if there is none."""
    sections = [Curve(curve.steps[bucket], curve.values[bucket]) for bucket in _buckets(len(curve.values), buckets)]
    finite = [section.finite() for section in sections]
    values = [values.mean() if len(values) else np.nan for values in finite]
    return Curve(np.array([section.steps.mean() for section in sections]), np.array(values))


def _buckets(points: int, buckets: int) -> list[NDArray[np.intp]]:
    """Return the indices of the points in at most so many buckets of equal size; the last one may be smaller."""
    size = -(-points // buckets)
    return np.split(np.arange(points), range(size, points, size))
