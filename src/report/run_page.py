"""The page of one run."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from src.report.curves import group_names, median, metric_chart, sampling_note, title
from src.report.evaluation import evaluation_section
from src.report.events import duration, event_table
from src.report.markup import Html, Section, card, duration_text, grid, number, table, text, tiles
from src.report.page import write_page
from src.report.pipeline import pipeline_charts
from src.report.run_folder import RunFolder
from src.report.settings import settings
from src.report.timeline import slowest_rank, time_charts

REPORT = "report.html"
_STATUS = {
    "finished": ("good", "finished"),
    "stopped": ("warn", "stopped by a signal"),
    "failed": ("bad", "failed"),
    "killed": ("bad", "killed"),
    "": ("", "no end recorded"),
}
_MOST_CURVES = 10  # of a chart; the accuracies of a hundred classes are in the section of the evaluation
_SPEED, _RANKS = ("throughput/",), ("ranks/",)


def write_run_page(folder: Path, scripts: Path | None) -> Path:
    """Write the page of the run in `folder`; return its path. `scripts` is that of `write_page`."""
    run = RunFolder(folder)
    sections = [
        _curve_section(run),
        _speed_section(run),
        _rank_section(run),
        Section("Pipeline", grid(pipeline_charts(run))),
        *(evaluation_section(split, evaluation) for split, evaluation in run.evaluations.items()),
        Section("Configuration", settings(run)),
        Section("Events", grid([card("", events, wide=True)]) if (events := event_table(run.events)) else ""),
    ]
    file = run.path / REPORT
    write_page(file, "Run", run.name, _lead(run), sections, scripts)
    return file


def _lead(run: RunFolder) -> Html:
    """Return the run's end, its hardware and its key figures."""
    color, status = _STATUS[run.status]
    facts = [
        run.strategy,
        _processes(run.world_size),
        run.started.get("device") or run.config.get("trainer.accelerator"),
    ]
    hardware = " · ".join(str(fact) for fact in facts if fact)
    lead = f'<p><span class="pill {color}">{status}</span> <span class="muted">{text(hardware)}</span></p>'
    if run.status in ("failed", "killed", "stopped") and (reason := run.events[-1].get("reason")):
        lead += f'<p class="alert">{text(reason)}</p>'
    return lead + tiles(_key_figures(run))


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


def _charts(run: RunFolder, groups: dict[str, list[str]]) -> list[Html]:
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
    single = card("Logged once", table(("metric", "value", "step"), rows)) if rows else ""
    body = grid(filter(None, [*_charts(run, drawn), single])) or '<p class="muted">No metric was logged.</p>'
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
    medians = [card("Medians over the log points", table(("", "median", "lowest", "highest"), rows))] if rows else []
    drawn = {group: names for group, names in groups.items() if _has_course(run, names)}
    return Section("Speed and memory", grid([*medians, *_charts(run, drawn)]))


def _rank_section(run: RunFolder) -> Section:
    groups = _groups(run, lambda name: name.startswith(_RANKS) and name != "ranks/slowest")
    charts = [*time_charts(run.timelines), *_charts(run, groups)]
    return Section("Ranks", grid(charts), slowest_rank(run.curves))
