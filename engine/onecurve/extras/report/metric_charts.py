"""Charts of the columns of metrics.csv, where long curves have fewer points, and stacked bars."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from markupsafe import Markup

from onecurve.extras.report.page import Figure, chart, new_figure, series_color
from onecurve.extras.report.run_folder import Curve

BUCKETS = 600  # of a long curve, each with its smallest and its largest value; a chart is some 600 pixels wide
_NOISY = 400  # points from which a curve is pale, with the mean of each of `_MEANS` sections upon it
_MEANS = 100
_WIDE_RANGE = 50  # largest value / smallest value from which an axis is logarithmic
_MOST_TIMES = 4  # the longest bar, from which a limit is no longer drawn
_FRACTIONS = ("acc", "val_class", "data_fraction", "gain", "mfu")  # last parts of the names of metrics from 0 to 1
_SPLITS = {"train": "var(--s1)", "val": "var(--s2)", "test": "var(--s4)"}  # and their colors
CATEGORIES = {"autorange": "reversed", "showgrid": False, "type": "category"}  # an axis of names, the first on top


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
        stem = stem.replace("/planned_", "/")
        groups.setdefault("lr" if stem.startswith("lr-") else stem, []).append(name)
    return groups


def metric_chart(metric: str, curves: dict[str, Curve]) -> Markup:
    """Return the chart of one group of metrics, given as curves by name."""
    figure = new_figure(260)
    for index, (name, curve) in enumerate(curves.items()):
        _add_curve(figure, name, curve, _SPLITS.get(name.partition("/")[0], series_color(index)))
    figure.update_xaxes(title="step", rangemode="tozero")
    style_value_axis(figure, metric, curves.values())
    return chart(figure, metric, _note(curves))


def stacked_bars(
    title: str,
    note: str,
    names: list[str],
    series: dict[str, tuple[str, list[float]]],
    unit: str,
    row: int = 0,
    limit: float | None = None,
) -> Markup:
    """Return a chart with a horizontal bar for each name, stacked of parts: `series` has their colors and values.

    A bar has `row` pixels; by default fewer if there are many. A line marks the limit, unless bars would be too short.
    """
    height = 84 + len(names) * (row or min(30, max(8, 700 // len(names))))
    figure = new_figure(height, barmode="stack", hovermode="y unified", bargap=0.35, yaxis=CATEGORIES)
    for label, (color, values) in series.items():
        marker = {"color": color, "line": {"width": 0}}
        if any(values):
            template = f"%{{x:.4g}} {unit}"
            figure.add_bar(x=values, y=names, name=label, orientation="h", marker=marker, hovertemplate=template)
    longest = max(map(sum, zip(*(values for _, values in series.values()), strict=True)))
    if limit and limit < _MOST_TIMES * longest:
        line = {"color": "var(--bad)", "width": 1.5, "dash": "dash"}
        figure.add_shape(x0=limit, x1=limit, yref="paper", y0=0, y1=1, line=line)
    figure.update_xaxes(title=unit)
    return chart(figure, title, note, wide=True)


def style_value_axis(figure: Figure, metric: str, curves: Iterable[Curve]) -> None:
    """Set the axis of a metric's values: in percent, from zero, or logarithmic if positive values have a wide range."""
    values = np.concatenate([curve.finite() for curve in curves])
    axis: dict[str, Any] = {}
    if metric.rpartition("/")[2] in _FRACTIONS:
        axis = {"tickformat": ".3~%", "hoverformat": ".2%", "rangemode": "tozero"}
    elif metric.startswith(("throughput/", "ranks/")):
        axis = {"rangemode": "tozero"}
    elif metric != "lr" and len(values) and 0 < _WIDE_RANGE * values.min() < values.max():
        axis = {"type": "log", "dtick": 1, "exponentformat": "power", "tickfont": {"size": 10}}
    figure.update_layout(yaxis=axis)


def _add_curve(figure: Figure, name: str, curve: Curve, color: str) -> None:
    shown = downsample(curve)
    is_noisy = len(curve.values) > _NOISY
    symbol, size = ("star", 11) if name.startswith("test/") else ("circle", 5)
    mode = "markers" if len(shown.values) == 1 else "lines+markers" if len(shown.values) < 40 else "lines"
    line, marker = {"color": color, "width": 1.7}, {"color": color, "symbol": symbol, "size": size}
    # With `cliponaxis` a marker on the axis would be drawn in half.
    style: dict[str, Any] = {"mode": mode, "marker": marker, "connectgaps": False, "cliponaxis": False}
    style |= {"opacity": 0.35, "line": line | {"width": 1.0}} if is_noisy else {"opacity": 1.0, "line": line}
    figure.add_scatter(x=shown.steps, y=shown.values, name=name, **style)
    if is_noisy:
        mean, line = means(curve, _MEANS), line | {"width": 2.0}
        figure.add_scatter(x=mean.steps, y=mean.values, name=name, mode="lines", line=line, hoverinfo="skip")


def _note(curves: dict[str, Curve]) -> str:
    """Return which points the chart leaves out because they are not finite."""
    missing = {name: curve.steps[~np.isfinite(curve.values)] for name, curve in curves.items()}
    return "; ".join(
        f"{name} is not finite at {len(steps)} points, first at step {steps[0]:.0f}"
        for name, steps in missing.items()
        if len(steps)
    )


def downsample(curve: Curve, buckets: int = BUCKETS) -> Curve:
    """Return the curve with the smallest and the largest value of each bucket, so that every spike stays visible.

    A curve of at most two points per bucket is returned as it is, but for infinite values, which become nan.
    """
    values = np.where(np.isfinite(curve.values), curve.values, np.nan)
    if len(values) <= 2 * buckets:
        return Curve(curve.steps, values)
    kept = {0, len(values) - 1}
    for bucket in np.array_split(np.arange(len(values)), buckets):
        ascending = bucket[np.argsort(values[bucket])]  # nan comes last
        largest = np.isfinite(values[bucket]).sum() - 1
        kept |= {ascending[0], ascending[largest]}
    chosen = sorted(kept)
    return Curve(curve.steps[chosen], values[chosen])


def means(curve: Curve, sections: int) -> Curve:
    """Return the mean step and the mean of the finite values of each section; nan if there is none."""
    split = [np.array_split(part, sections) for part in curve]
    finite = [Curve(steps, values).finite() for steps, values in zip(*split, strict=True)]
    values = [values.mean() if len(values) else np.nan for values in finite]
    return Curve(np.array([steps.mean() for steps in split[0]]), np.array(values))
