"""The page of one run."""

import shlex
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from src.report.evaluation import evaluation_section
from src.report.metric_charts import group_names, median, metric_chart, sampling_note, title
from src.report.page import Section, duration_text, macros, number, parts, write_page
from src.report.rank_charts import pipeline_charts, slowest_rank, time_charts
from src.report.run_folder import RunFolder

REPORT = "report.html"
_STATUS = {
    "finished": ("good", "finished"),
    "stopped": ("warn", "stopped by a signal"),
    "failed": ("bad", "failed"),
    "killed": ("bad", "killed"),
    "": ("", "no end recorded"),
}
_MOST_CURVES = 10  # of a chart; the accuracies of a hundred classes are in the section of the evaluation
_HIDDEN = "runtime."  # options that the program has set
_SPEED, _RANKS = ("throughput/",), ("ranks/",)


def write_run_page(folder: Path, scripts: Path | None) -> Path:
    """Write the page of the run in `folder`; return its path. `scripts` is that of `write_page`."""
    run = RunFolder(folder)
    sections = [
        _curve_section(run),
        _speed_section(run),
        _rank_section(run),
        Section("Pipeline", parts.grid(pipeline_charts(run))),
        *(evaluation_section(split, evaluation) for split, evaluation in run.evaluations.items()),
        Section("Configuration", _settings(run)),
        Section("Events", _event_table(run.events)),
    ]
    file = run.path / REPORT
    write_page(file, "Run", run.name, _lead(run), sections, scripts)
    return file


def _lead(run: RunFolder) -> Markup:
    """Return the run's end, its hardware and its key figures."""
    color, status = _STATUS[run.status]
    device = run.started.get("device") or run.config.get("trainer.accelerator")
    hardware = " · ".join(str(fact) for fact in (run.strategy, _processes(run.world_size), device) if fact)
    reason = run.events[-1].get("reason") if run.status in ("failed", "killed", "stopped") else ""
    return macros("run").lead(color, status, hardware, reason, list(_key_figures(run)))


def _processes(world_size: int | None) -> str:
    return "" if world_size is None else f"{world_size} process{'es' if world_size > 1 else ''}"


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
    if (speed := median(curves, "throughput/samples_per_sec")) is not None:
        yield "Images per second", number(speed), "median"
    if "throughput/peak_memory_mib" in curves:
        yield "Peak memory", number(float(curves["throughput/peak_memory_mib"].values.max()), "MiB"), "of any process"
    if (seconds := duration(run.events)) is not None:
        yield "Duration", duration_text(seconds), ""


def _charts(run: RunFolder, groups: dict[str, list[str]]) -> list[Markup]:
    return [
        metric_chart(group, {name: run.curves[name] for name in names}, run.events) for group, names in groups.items()
    ]


def _groups(run: RunFolder, wanted: Any) -> dict[str, list[str]]:
    groups = group_names(run.curves)
    order = ["loss", "acc", "lr"]
    names = sorted(filter(wanted, groups), key=lambda name: order.index(name) if name in order else len(order))
    return {name: groups[name] for name in names}


def _curve_section(run: RunFolder) -> Section:
    groups = _groups(run, lambda name: not name.startswith((*_SPEED, *_RANKS)))
    drawn = {group: names for group, names in groups.items() if _has_course(run, names) and len(names) <= _MOST_CURVES}
    once = [names[0] for group, names in groups.items() if not _has_course(run, names) and len(names) == 1]
    rows = [(name, float(run.curves[name].values[0]), int(run.curves[name].steps[0])) for name in once]
    single = parts.card("Logged once", parts.table(("metric", "value", "step"), rows)) if rows else ""
    body = parts.grid([*_charts(run, drawn), single]).strip() or parts.muted("No metric was logged.")
    note = f"Training values are those of single steps. {sampling_note(run.curves)}"
    return Section("Learning", body, note)


def _has_course(run: RunFolder, names: list[str]) -> bool:
    return any(len(run.curves[name].values) > 1 for name in names)


def _speed_section(run: RunFolder) -> Section:
    groups = _groups(run, lambda name: name.startswith(_SPEED))
    found = {name: run.curves[name].finite() for names in groups.values() for name in names}
    rows = [
        (title(name), float(np.median(values)), float(values.min()), float(values.max()))
        for name, values in found.items()
        if len(values)
    ]
    table = parts.table(("", "median", "lowest", "highest"), rows)
    medians = parts.card("Medians over the log points", table) if rows else ""
    drawn = {group: names for group, names in groups.items() if _has_course(run, names)}
    return Section("Speed and memory", parts.grid([medians, *_charts(run, drawn)]))


def _rank_section(run: RunFolder) -> Section:
    groups = _groups(run, lambda name: name.startswith(_RANKS) and name != "ranks/slowest")
    charts = [*time_charts(run.timelines), *_charts(run, groups)]
    return Section("Ranks", parts.grid(charts), slowest_rank(run.curves))


def _event_table(events: list[dict[str, Any]]) -> Markup:
    """Return the events as a table, in the order of time."""
    rows = [
        (
            macros("run").time(datetime.fromtimestamp(event.get("time") or 0.0)),
            event["event"],
            event.get("step"),
            event.get("reason") or " ".join(map(str, event.get("command") or [])),
        )
        for event in events
    ]
    table = parts.table(("time", "event", "step", "reason or command"), rows)
    return parts.grid([parts.card("", table, wide=True)]) if rows else Markup()


def duration(events: list[dict[str, Any]]) -> float | None:
    """Return the seconds in which the run had a process; None if no end is recorded."""
    total, began = None, None
    for event in events:
        if event["event"] in ("start", "resume"):
            began = float(event["time"])
        elif began is not None:
            total, began = (total or 0.0) + float(event["time"]) - began, None
    return total


def _settings(run: RunFolder) -> Markup:
    """Return the command and revision of the newest start, and the tables of the configuration."""
    start, page = run.started, macros("run")
    changes = {name: pair for name, pair in (start.get("changes") or {}).items() if isinstance(pair, list)}
    rows = [(page.option(name), page.option_value(pair[-1])) for name, pair in changes.items()]
    shown = {name: value for name, value in run.config.items() if not name.startswith(_HIDDEN)}
    options = [(page.option(name), page.option_value(value)) for name, value in shown.items()]
    command = shlex.join(map(str, start.get("command") or []))
    return page.settings(command, str(start.get("revision") or "")[:12], bool(start.get("modified")), rows, options)
