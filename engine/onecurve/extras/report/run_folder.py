"""What a run folder holds, read when it is asked for; a file that is missing or cut by a kill is no error."""

import csv
import json
import os
from collections import Counter, defaultdict
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray
from omegaconf import OmegaConf

from onecurve.checkpoint.format import VERSION_KEY
from onecurve.errors import UserError
from onecurve.identity.option_kinds import HARDWARE, experiment_options, flatten_config, matches
from onecurve.records.events import ENDS, STARTS, last_of, read_events
from onecurve.records.files import CONFIG, METRICS, read_json_lines

Floats = NDArray[np.float64]
_RECORDED = ("data_source", "experiment", "numerics", VERSION_KEY)  # beside the options in config.yaml
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
    with file.open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if None not in row.values()]  # a kill may have cut the last one
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


class RunFolder:
    """A run folder; each part is empty if its file is missing."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))  # without "..", which has no name
        self.name = self.path.name

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, by dotted name."""
        return flatten_config(read_mapping(self.path / CONFIG))

    @cached_property
    def experiment_options(self) -> dict[str, Any]:
        """The options of its experiment, by dotted name; if a class cannot be imported, all but known hardware."""
        config = read_mapping(self.path / CONFIG)
        options = {name: node for name, node in config.items() if name not in _RECORDED}
        try:
            return experiment_options(OmegaConf.create(options))
        except UserError:  # such as a class of a script
            flat = flatten_config(options)
        return {name: value for name, value in flat.items() if not matches(name, HARDWARE)}

    @cached_property
    def curves(self) -> dict[str, Curve]:
        return read_metrics(self.path / METRICS)

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
    def rank_seconds(self) -> dict[int, dict[str, float]]:
        """The seconds of each activity by rank, over all intervals of its timeline, in the order of the ranks."""
        files = {int(file.stem.removeprefix("rank")): file for file in (self.path / "timeline").glob("rank*.jsonl")}
        seconds = defaultdict[int, Any](Counter)
        for rank, file in sorted(files.items()):
            for line in read_json_lines(file):
                seconds[rank].update(line["spans"] if line.get("kind") == "interval" else {})
        return {rank: dict(spent) for rank, spent in seconds.items()}

    @property
    def experiment(self) -> str | None:
        """The fingerprint of its experiment; None in a run of an earlier version."""
        return self.config.get("experiment")

    @property
    def numerics(self) -> dict[str, Any]:
        """What changes the last bits of its numbers, but no experiment."""
        return {"device": self.started.get("device")} | self.started.get("numerics", {})

    @property
    def started(self) -> dict[str, Any]:
        """The newest event that has the command and the changed options; empty if none is recorded."""
        return last_of(self.events, *STARTS)

    @property
    def ended(self) -> dict[str, Any]:
        """The newest end; empty if the last start has none."""
        last = last_of(self.events, *STARTS, *ENDS)
        return last if last.get("event") in ENDS else {}

    @property
    def status(self) -> str:
        """How the run has ended: finished, stopped, failed, killed, or "" if no end is recorded."""
        return self.ended.get("event", "")

    @property
    def strategy(self) -> str:
        recorded = self.started.get("strategy") or self.config.get("strategy._target_")
        return str(recorded or "unknown").rpartition(".")[2]

    @property
    def world_size(self) -> int | None:
        return self.started.get("world_size")

    @cached_property
    def speeds(self) -> dict[int | None, float]:
        """The median of samples per second for each number of processes, in the order of their first rows."""
        starts = [event for event in self.events if event["event"] in STARTS]
        logged: dict[int | None, list[float]] = defaultdict(list)
        for step, value in zip(*self.curves.get("throughput/samples_per_sec", ((), ())), strict=True):
            sizes = [start.get("world_size") for start in starts if (start["step"] or 0) <= step]
            logged[sizes[-1] if sizes else None].append(value)
        return {size: float(np.nanmedian(values)) for size, values in logged.items()}
