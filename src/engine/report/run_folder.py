"""What a run folder holds, read when it is asked for; a file that is missing or cut by a kill is no error."""

import csv
import json
import os
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from src.engine.utils.events import read_events
from src.engine.utils.files import read_json_lines
from src.engine.utils.overrides import flatten_config
from src.engine.utils.targets import with_moved_targets

Floats = NDArray[np.float64]
Seconds = dict[str, float]  # by activity
OTHER = "other"  # the activity of the time that no other one covers
ENDS = ("finished", "stopped", "failed", "killed")
_MOST_INTERVALS = 10_000  # of a rank; a chart over time has far fewer columns
_NEWEST_STEPS = 100  # of a pipeline
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Curve(NamedTuple):
    """The logged values of one metric and their optimizer steps, both of shape (points,)."""

    steps: Floats
    values: Floats

    def finite(self) -> Floats:
        """Return the values that are neither nan nor infinite."""
        return self.values[np.isfinite(self.values)]


def read_mapping(file: Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML file, or an empty one if the file is missing or unreadable."""
    try:
        text = file.read_text()
        content = json.loads(text) if file.suffix == ".json" else yaml.load(text, _YAML_LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def read_metrics(file: Path) -> dict[str, Curve]:
    """Return the curve of each column of metrics.csv, without empty cells and rows that have no step."""
    if not file.is_file():
        return {}
    with file.open(newline="", errors="replace") as stream:
        lines = (line.replace("\0", "") for line in stream)  # a crash of the machine may leave zeros
        rows = [row for row in csv.DictReader(lines) if None not in row.values()]  # a kill may have cut the last one
    curves = {}
    for name in rows[0] if rows else ():
        logged = [(_to_float(row["step"]), _to_float(row[name])) for row in rows if row["step"] and row[name]]
        if logged and name != "step":
            curves[name] = Curve(*np.array(logged).T)
    return curves


def _to_float(cell: str) -> float:
    """Return the number in a cell, nan for a text."""
    try:
        return float(cell)
    except ValueError:
        return nan


def total_seconds(intervals: Iterable[Seconds]) -> Seconds:
    """Return the seconds of each activity in all intervals."""
    totals: Seconds = {}
    for interval in intervals:
        for activity, seconds in interval.items():
            totals[activity] = totals.get(activity, 0.0) + seconds
    return totals


@dataclass
class RankTimeline:
    """The records of one rank: intervals between log points, and the passes of a pipeline's newest recorded steps.

    Of a long run, an interval is the sum of several. `losses` has the rank's own loss by the step of metrics.csv.
    """

    rank: int
    intervals: list[Seconds] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    passes: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_NEWEST_STEPS))


class RunFolder:
    """A run folder; each part is empty if its file is missing."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))  # without "..", which has no name
        self.name = self.path.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, by dotted name."""
        return flatten_config(with_moved_targets(read_mapping(self.path / "config.yaml")))

    @cached_property
    def curves(self) -> dict[str, Curve]:
        return read_metrics(self.path / "metrics.csv")

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The events, the earliest first."""
        return read_events(self.path)

    @cached_property
    def evaluations(self) -> dict[str, dict[str, Any]]:
        """The newest evaluation of each split that has one, `test` first."""
        found = {split: read_mapping(self.path / "evaluation" / f"{split}.json") for split in ("test", "val")}
        return {split: evaluation for split, evaluation in found.items() if evaluation}

    @cached_property
    def timelines(self) -> list[RankTimeline]:
        """The timelines in the order of the ranks."""
        files = (self.path / "timeline").glob("rank*.jsonl")
        return sorted((_timeline(file) for file in files), key=lambda timeline: timeline.rank)

    @property
    def experiment(self) -> str | None:
        """The fingerprint of its experiment; None in a run of an earlier version."""
        recorded = self.config.get("experiment")
        return str(recorded) if recorded else None

    @property
    def started(self) -> dict[str, Any]:
        """The newest event that has the command and the changed options; empty if none is recorded."""
        return next((event for event in reversed(self.events) if event["event"] in ("start", "resume")), {})

    @property
    def status(self) -> str:
        """How the run has ended: finished, stopped, failed, killed, or "" if no end is recorded."""
        last = self.events[-1]["event"] if self.events else ""
        return last if last in ENDS else ""

    @property
    def strategy(self) -> str:
        recorded = self.started.get("strategy") or self.config.get("strategy._target_")
        return str(recorded or "unknown").rpartition(".")[2]

    @property
    def world_size(self) -> int | None:
        if recorded := self.started.get("world_size"):
            return int(recorded)
        devices, nodes = self.config.get("trainer.devices"), self.config.get("trainer.num_nodes", 1)
        return devices * nodes if isinstance(devices, int) and isinstance(nodes, int) else None


def _timeline(file: Path) -> RankTimeline:
    number = file.stem.removeprefix("rank")
    timeline = RankTimeline(int(number) if number.isdigit() else 0)
    for record in read_json_lines(file):
        if isinstance(record.get("loss"), float):
            timeline.losses[record["step"] - 1] = record["loss"]
        if record.get("kind") == "interval" and record.get("seconds"):
            timeline.intervals.append(_seconds(record))
            if len(timeline.intervals) == _MOST_INTERVALS:
                pairs = zip(timeline.intervals[::2], timeline.intervals[1::2], strict=True)
                timeline.intervals = list(map(total_seconds, pairs))
        elif record.get("kind") == "passes" and record.get("passes"):
            timeline.passes.append(record)
    return timeline


def _seconds(interval: dict[str, Any]) -> Seconds:
    """Return the seconds of each activity; `other` includes the time that no activity covers."""
    seconds = {str(activity): float(value) for activity, value in (interval.get("spans") or {}).items()}
    uncovered = max(0.0, float(interval["seconds"]) - sum(seconds.values()))
    return seconds | {OTHER: seconds.get(OTHER, 0.0) + uncovered}
