"""The page of one run."""

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from onecurve.extras.report.metric_charts import group_names, median, metric_chart, stacked_bars
from onecurve.extras.report.page import Section, chart, duration_text, macros, new_figure, number, parts, write_page
from onecurve.extras.report.run_folder import Curve, RunFolder
from onecurve.records.events import ENDS, STARTS

REPORT = "report.html"
_MOST_CURVES = 10  # of a chart; the accuracies of a hundred classes are in the section of the evaluation
_SPLIT_NAMES = {"test": "Test", "val": "Validation"}
_HEAT = [[stop, f"var(--heat{index})"] for index, stop in enumerate((0, 0.08, 0.35, 0.7, 1))]
_MOST_CLASSES = 200  # of a matrix; that of a thousand is 20 MB, and its cells are smaller than a pixel
_MOST_LABELED = 20  # classes of a matrix whose cells have room for a number, and of the table of the lowest accuracies
_HIDDEN = "runtime."  # options that the program has set
_SECTIONS = ("throughput", "ranks")  # first parts of the names of metrics that have sections of their own
_ACTIVITIES = {  # of a rank: labels and colors
    "data": ("data", "var(--s10)"),
    "forward_backward": ("forward and backward", "var(--s1)"),
    "communication": ("communication", "var(--s2)"),
    "optimizer": ("optimizer", "var(--s3)"),
    "validation": ("validation", "var(--s5)"),
    "save": ("save", "var(--s4)"),
    "other": ("other", "var(--idle)"),
}


def write_run_page(folder: Path, scripts: Path | None) -> Path:
    """Write the page of the run in `folder`; return its path. `scripts` is that of `write_page`."""
    run = RunFolder(folder)
    sections = [
        _curve_section(run),
        Section("Speed and memory", parts.grid(_charts(_groups(run, "throughput")))),
        Section("Ranks", parts.grid(_rank_charts(run))),
        *(_evaluation_section(split, evaluation) for split, evaluation in run.evaluations.items()),
        Section("Configuration", _settings(run)),
        Section("Events", macros("run").events(run.events)),
    ]
    return write_page(run.path / REPORT, "Run", run.name, _lead(run), sections, scripts)


def _lead(run: RunFolder) -> Markup:
    """Return the run's end, its hardware and its key figures."""
    device = run.started.get("device") or run.config.get("trainer.accelerator")
    processes = f"{run.world_size} process{'es' if run.world_size > 1 else ''}" if run.world_size else ""
    hardware = " · ".join(str(fact) for fact in (run.strategy, processes, device) if fact)
    color, status = ENDS.get(run.status, ""), run.status or "no end recorded"
    return macros("run").lead(color, status, hardware, run.ended.get("reason"), list(_key_figures(run)))


def _key_figures(run: RunFolder) -> Iterable[tuple[str, str, str]]:
    curves = run.curves
    if "val/acc" in curves and len(curves["val/acc"].finite()):
        best = int(np.nanargmax(curves["val/acc"].values))
        step = curves["val/acc"].steps[best]
        yield "Best val/acc", f"{curves['val/acc'].values[best]:.2%}", f"at step {step:,.0f}"
    if "test/acc" in curves:
        yield "test/acc", f"{curves['test/acc'].values[-1]:.2%}", f"at step {curves['test/acc'].steps[-1]:,.0f}"
    if "train/loss" in curves:
        last = curves["train/loss"]
        yield "train/loss", number(float(last.values[-1])), f"at step {last.steps[-1]:,.0f}"
    for size, speed in run.speeds.items():
        yield "Samples per second", number(speed), "median" + f" of {size} processes" * (len(run.speeds) > 1)
    planned, measured = (median(curves, f"throughput/{name}") for name in ("planned_step_ms", "step_ms"))
    if planned and measured:
        yield "Step", number(measured, "ms"), f"median, {measured / planned:.2f} of the planned {number(planned, 'ms')}"
    if "throughput/peak_memory_mib" in curves:
        yield "Peak memory", number(float(curves["throughput/peak_memory_mib"].values.max()), "MiB"), "of any process"
    if (seconds := duration(run.events)) is not None:
        yield "Duration", duration_text(seconds), ""


def _groups(run: RunFolder, section: str) -> dict[str, dict[str, Curve]]:
    """Return the curves of each chart of a section: `throughput`, `ranks`, or "" for all other metrics."""
    groups = {group: {name: run.curves[name] for name in names} for group, names in group_names(run.curves).items()}
    order = ["loss", "acc", "lr"]
    names = sorted(groups, key=lambda group: order.index(group) if group in order else len(order))
    prefixes = {name: name.partition("/")[0] for name in names}
    return {name: groups[name] for name in names if section == (prefixes[name] if prefixes[name] in _SECTIONS else "")}


def _charts(groups: dict[str, dict[str, Curve]]) -> list[Markup]:
    """Return the charts of the groups that have a course, and not too many curves."""
    return [
        metric_chart(group, curves)
        for group, curves in groups.items()
        if len(curves) <= _MOST_CURVES and _has_course(curves)
    ]


def _has_course(curves: dict[str, Curve]) -> bool:
    return any(len(curve.values) > 1 for curve in curves.values())


def _curve_section(run: RunFolder) -> Section:
    groups = _groups(run, "")
    single = [
        one
        for curves in groups.values()
        if len(curves) <= _MOST_CURVES and not _has_course(curves)
        for one in curves.items()
    ]
    rows = [(name, float(curve.values[0]), int(curve.steps[0])) for name, curve in single]
    once = parts.card("Logged once", parts.table(("metric", "value", "step"), rows)) if rows else ""
    body = parts.grid([*_charts(groups), once]).strip() or parts.muted("No metric was logged.")
    note = "Training values are those of single steps; a bold line is the mean of sections of a long curve."
    return Section("Learning", body, note)


def _rank_charts(run: RunFolder) -> list[Markup]:
    charts = _charts(_groups(run, "ranks"))
    if not run.rank_seconds:
        return charts
    series = {
        label: (color, [spent.get(activity, 0.0) for spent in run.rank_seconds.values()])
        for activity, (label, color) in _ACTIVITIES.items()
    }
    names = [f"rank {rank}" for rank in run.rank_seconds]
    note = "Sum over the recorded intervals of each rank."
    times = stacked_bars("Where the time goes", note, names, series, "seconds")
    if not run.config.get("strategy.schedule"):
        return [times, *charts]
    from onecurve.extras.report.passes import passes_chart  # late: it imports torch, which takes seconds

    return [times, passes_chart(run), *charts]


def _evaluation_section(split: str, evaluation: dict[str, Any]) -> Section:
    """Return the section of one split: its confusion matrix, and the classes with the lowest accuracies."""
    classes, confusion = evaluation["classes"], np.array(evaluation["confusion"])
    counts, correct = confusion.sum(axis=1), confusion.diagonal()
    per_class = zip(classes, counts.tolist(), correct.tolist(), strict=True)
    rows = sorted(((name, count, hits / count) for name, count, hits in per_class if count), key=lambda row: row[2])
    table = parts.table(("class", "images", "accuracy"), rows[:_MOST_LABELED], sortable=True)
    matrix = [_confusion_chart(confusion, classes)] if len(classes) <= _MOST_CLASSES else []
    body = parts.grid([*matrix, parts.card("Lowest accuracies", table)], "narrow")
    return Section(f"{_SPLIT_NAMES[split]} set", body, f"The newest evaluation, at step {evaluation['step']:,}.")


def _confusion_chart(confusion: NDArray[np.int64], classes: list[str]) -> Markup:
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    few = len(classes) <= _MOST_LABELED
    style: dict[str, Any] = {"zmin": 0, "zmax": 1, "colorscale": _HEAT, "showscale": False, "textfont": {"size": 11}}
    style["hovertemplate"] = "%{y} taken for %{x}: %{customdata:,.0f} (%{z:.1%})<extra></extra>"
    if few:
        text = [[f"{count:,}" if count else "" for count in row] for row in confusion]
        style |= {"xgap": 1, "ygap": 1, "text": text, "texttemplate": "%{text}"}
    figure = new_figure(400, hovermode="closest")
    figure.add_heatmap(z=share, customdata=confusion, x=classes, y=classes, **style)
    axis = {"type": "category", "showgrid": False, "showticklabels": len(classes) < 40}
    figure.update_xaxes(axis | {"title": "predicted", "tickangle": -45})
    figure.update_yaxes(axis | {"title": "true", "autorange": "reversed"})
    total = f"{confusion.sum():,} images, {np.trace(confusion) / confusion.sum():.2%} of them right"
    return chart(figure, "Confusion matrix", f"{total}. Shades are fractions of a row.")


def duration(events: list[dict[str, Any]]) -> float | None:
    """Return the seconds in which the run had a process; None if no end is recorded."""
    total, began = None, None
    for event in events:
        if event["event"] in STARTS:
            began = float(event["time"])
        elif event["event"] in (*ENDS, "restart") and began is not None:
            total, began = (total or 0.0) + float(event["time"]) - began, None
    return total


def _settings(run: RunFolder) -> Markup:
    """Return the command and revision of the newest start, and the tables of the configuration."""
    options = {name: value for name, value in run.config.items() if not name.startswith(_HIDDEN)}
    command = shlex.join(map(str, run.started.get("command") or []))
    return macros("run").settings(command, run.started, run.started.get("changes"), options)
