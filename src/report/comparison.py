"""The comparison of several runs: their curves upon each other, and below them the difference from the first run."""

import os
from pathlib import Path
from typing import Any

from src.report.agreement import difference, verdicts
from src.report.comparison_figure import comparison_figure
from src.report.curves import median, title
from src.report.figure import bar_figure
from src.report.files import Curve
from src.report.markup import Html, Markup, Section, card, chart, grid, number, series_color, swatch, table, text
from src.report.page import write_page
from src.report.run_folder import RunFolder

_COMPARED = ("train/loss", "val/loss", "val/acc")


def write_comparison(runs: list[RunFolder], file: Path, scripts: Path | None) -> None:
    """Write the comparison of several runs with the first one. `scripts` is that of `write_page`."""
    names = labels(runs)
    compared = [metric for metric in _COMPARED if all(metric in run.curves for run in runs)]
    charts = [_comparison_chart(metric, runs, names, wide=metric == compared[0]) for metric in compared]
    sections = [
        Section(
            "Curves and differences",
            grid(charts) or '<p class="muted">The runs have no metric in common.</p>',
            "Each curve is narrower than the one before it, so that equal curves lie visibly on each other. "
            "In float64 the difference stays below the line, on any hardware; in float32 rounding makes it grow, "
            "up to the noise of two seeds.",
        ),
        Section("Runs", _run_table(runs, names)),
        Section("Speed and memory", _speed_charts(runs, names)),
    ]
    write_page(
        file,
        "Comparison",
        f"{len(runs)} runs",
        _verdicts(runs, names),
        sections,
        scripts,
    )


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


def _verdicts(runs: list[RunFolder], names: list[str]) -> Html:
    """Return a sentence for each two runs of one experiment: whether they have one curve."""
    pills = {True: '<span class="pill warn">different curves</span>', False: '<span class="pill good">one curve</span>'}
    lines = [f'<p class="lead">{pills[parts]} {text(sentence)}</p>' for sentence, parts in verdicts(runs, names)]
    return "".join(lines) or '<p class="lead">No two runs are of one experiment.</p>'


def _run_table(runs: list[RunFolder], names: list[str]) -> Html:
    rows: list[list[Any]] = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        label = Markup(f'<span class="fixed">{swatch(series_color(index))}{text(name)}</span>')
        both = "train/loss" in run.curves and "train/loss" in runs[0].curves
        gap = _largest(run.curves["train/loss"], runs[0].curves["train/loss"]) if both else None
        last = [float(run.curves[name].values[-1]) if name in run.curves else None for name in ("val/acc", "test/acc")]
        speed, memory = (median(run.curves, f"throughput/{key}") for key in ("samples_per_sec", "peak_memory_mib"))
        rows.append([label, run.name, run.experiment or "–", gap, *last, speed, memory])
    columns = ["run", "folder", "experiment", "largest difference", "val/acc", "test/acc", "images per second"]
    return grid([card("", table([*columns, "memory, MiB"], rows, sortable=True), wide=True)])


def _comparison_chart(metric: str, runs: list[RunFolder], names: list[str], *, wide: bool) -> Html:
    figure = comparison_figure(metric, runs, names, 560 if wide else 440)
    return chart(figure, f"{title(metric.rpartition('/')[2])}: {metric}", wide=wide)


def _speed_charts(runs: list[RunFolder], names: list[str]) -> Html:
    charts = [
        _bar_chart(metric, [median(run.curves, metric) for run in runs], names)
        for metric in ("throughput/samples_per_sec", "throughput/peak_memory_mib")
        if any(metric in run.curves for run in runs)
    ]
    return grid(charts)


def _bar_chart(metric: str, values: list[float | None], names: list[str]) -> Html:
    colors = [series_color(index) for index in range(len(names))]
    figure = bar_figure(60 + 36 * len(names), names, values, list(map(number, values)), colors)
    figure.update_xaxes(rangemode="tozero", range=[0, 1.18 * max(value or 0.0 for value in values)])
    return chart(figure, title(metric), "Median over the log points.")
