"""Readers of the files of a run folder; a file that is missing or cut by a kill is no error."""

import csv
import json
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Curve(NamedTuple):
    """The logged values of one metric and their optimizer steps, both of shape (points,)."""

    steps: Floats
    values: Floats

    def finite(self) -> Floats:
        """Return the values that are neither nan nor infinite."""
        return self.values[np.isfinite(self.values)]


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the file is missing or unreadable."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, or an empty one if the file is missing or unreadable."""
    try:
        content = yaml.load(file.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def read_metrics(file: Path) -> dict[str, Curve]:
    """Return the curve of each column of metrics.csv, without empty cells and rows that have no step."""
    if not file.is_file():
        return {}
    with file.open(newline="", errors="replace") as stream:
        lines = (line.replace("\0", "") for line in stream)  # a crash of the machine may leave zeros
        header, *rows = list(csv.reader(lines)) or [[]]
    rows = [row for row in rows if len(row) == len(header)]  # a kill may have cut the last one
    columns = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else {}
    steps = _to_floats(columns.pop("step", ()))
    curves = {}
    for name, cells in columns.items():
        is_logged = np.fromiter(map(bool, cells), dtype=bool, count=len(cells)) & np.isfinite(steps)
        if is_logged.any():
            curves[name] = Curve(steps[is_logged], _to_floats(cells)[is_logged])
    return curves


def _to_floats(cells: Sequence[str]) -> Floats:
    """Return the numbers in the cells, nan for an empty one; a column that has a text has no numbers."""
    try:
        return np.array([float(cell) if cell else nan for cell in cells], dtype=np.float64)
    except ValueError:
        return np.full(len(cells), nan)
