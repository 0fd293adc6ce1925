"""Reports: a table per case with median and spread, and a CSV file of every reading."""

import csv
import statistics
from pathlib import Path

from rich.table import Table

from scripts.dev.benchmarks.programs import Case, Readings
from src.engine.utils.files import atomic_write


def table(case: Case, readings: Readings) -> Table:
    """Return a row per program: the median and range of each number, and of the ratio to the first program."""
    names = list(dict.fromkeys(name for rounds in readings.values() for name in rounds[0]))
    rounds = len(next(iter(readings.values())))
    title = f"{case.name}: median of {rounds} (least to greatest)"
    result = Table("", *names, f"ratio of {case.metric}", title=title, title_justify="left")
    for program in case.programs:
        values = readings[program.name]
        cells = [_spread([value[name] for value in values]) if name in values[0] else "" for name in names]
        result.add_row(program.name, *cells, _spread(ratios(case, readings, program.name)))
    return result


def ratios(case: Case, readings: Readings, program: str) -> list[float]:
    """Return the program's number over that of the case's first program, in each round."""
    first = readings[case.programs[0].name]
    return [own[case.metric] / other[case.metric] for own, other in zip(readings[program], first, strict=True)]


def write(found: dict[str, list[tuple[Case, Readings]]], file: Path) -> None:
    """Write every reading of every program, one number per row."""
    with atomic_write(file) as temporary, temporary.open("w", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["measurement", "case", "program", "round", "name", "value"])
        for measurement, cases in found.items():
            for case, readings in cases:
                for program, values in readings.items():
                    for number, value in enumerate(values):
                        rows.writerows([measurement, case.name, program, number, *pair] for pair in value.items())


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
