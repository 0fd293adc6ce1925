"""The page of a plan: the candidates, their memory and seconds by part, and the strategies that are refused."""

from pathlib import Path
from textwrap import wrap
from typing import Any

from markupsafe import Markup

from onecurve.extras.report.metric_charts import stacked_bars
from onecurve.extras.report.page import Section, number, parts, series_color, write_page

_LABEL, _ROW = 34, 46  # characters of a line of a bar's label; pixels of a bar, whose label has up to three lines


def write_plan_page(folder: Path, plan: dict[str, Any]) -> Path:
    """Write plan.html into the run folder, from the content of its plan.json; return its path."""
    rows, columns, refused, usable_gib = plan["candidates"], plan["columns"], plan["refused"], plan["usable GiB"]
    table = parts.table(columns, [[row[name] for name in columns] for row in rows], sortable=True)
    candidates = parts.grid([parts.card("", table, wide=True)])
    note = "The best is the first. MB are those that the busiest rank sends in a step."
    sections = [
        Section("Candidates", candidates if rows else parts.muted("The run refuses all strategies."), note),
        Section("Memory and time", parts.grid(_charts(rows, usable_gib) if rows else [])),
        Section("Refused", _errors(refused)),
    ]
    tiles = []
    for row in rows[:1]:
        step, gib = number(row["step_ms"], "ms"), number(row["GiB"], "GiB")
        usable = f"of {number(usable_gib, 'GiB')} that a device has for a run"
        tiles = [("Best", row["strategy"], row["why not"]), ("Step", step, ""), ("Memory", gib, usable)]
    return write_page(folder / "plan.html", "Plan", plan["title"], parts.tiles(tiles), sections, folder.parent)


def _errors(refused: dict[str, list[str]]) -> Markup:
    """Return the table of the errors, each with the names of its candidates."""
    rows = [
        (error, parts.details(f"{names[0]} and {len(names) - 1} more", ", ".join(names)) if names[1:] else names[0])
        for error, names in refused.items()
    ]
    return parts.grid([parts.card("", parts.table(["error", "strategies"], rows), wide=True)] if rows else [])


def _charts(rows: list[dict[str, Any]], usable_gib: float) -> list[Markup]:
    """Return the charts of the memory and of a step's time, a bar for each candidate."""
    names = ["<br>".join(wrap(row["strategy"], _LABEL)) for row in rows]
    note = f"Of the rank that needs most. A device has {number(usable_gib, 'GiB')} for a run."

    def series(key: str, factor: float) -> dict[str, tuple[str, list[float]]]:
        labels = dict.fromkeys(label for row in rows for label in row[key])
        values = {label: [factor * row[key].get(label, 0) for row in rows] for label in labels}
        return {label: (series_color(index), values[label]) for index, label in enumerate(labels)}

    return [
        stacked_bars("Memory", note, names, series("memory", 2**-30), "GiB", _ROW, usable_gib),
        stacked_bars("Optimizer step", "", names, series("seconds", 1000), "milliseconds", _ROW),
    ]
