"""Programs to compare, run in turn, so that slow minutes of the machine affect all of them; a table per case."""

import json
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.table import Table

from engine.dev.shared.process import run_limited

Readings = dict[str, list[dict[str, float]]]  # by program: a reading per round, numbers by name


@dataclass
class Program:
    """A command, and the readings after its end.

    Attributes:
        command: its arguments; `{scratch}` stands for an empty folder, where the program may write the clock.json of
            `Marks` (`engine/dev/peers/common.py`).
        read: returns further numbers from the scratch folder.
        samples: per step, over all processes.
    """

    name: str
    command: list[str]
    read: Callable[[Path], dict[str, float]] = lambda scratch: {}
    samples: int | None = None


@dataclass
class Case:
    """Programs that do the same work. `metric` compares each of them with the first."""

    name: str
    metric: str
    programs: list[Program] = field(default_factory=list)

    def keep(self, pattern: str) -> None:
        """Drop programs whose name does not match `pattern`, except the first."""
        self.programs[1:] = [other for other in self.programs[1:] if re.search(pattern, other.name)]


def run_in_turn(case: Case, rounds: int, scratch: Path) -> Readings:
    """Run each of the case's programs once per round, in reverse order in every second round."""
    readings: Readings = {program.name: [] for program in case.programs}
    for number in range(rounds):
        for program in case.programs[:: -1 if number % 2 else 1]:
            readings[program.name].append(_run(program, scratch))
    return readings


def _run(program: Program, scratch: Path) -> dict[str, float]:
    """Return seconds to the end of the first step, milliseconds per later step, and the program's own readings."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    command = [part.replace("{scratch}", str(scratch)) for part in program.command]
    start = time.time()
    if code := run_limited(command, scratch / "log"):
        sys.exit(f"error: {' '.join(command)} ended with {code}:\n{(scratch / 'log').read_text()[-3000:]}")
    found = _read_clock(scratch / "clock.json", start)
    if program.samples:
        found["samples/s"] = 1000 * program.samples / found["step ms"]
    return found | program.read(scratch)


def _read_clock(file: Path, start: float) -> dict[str, float]:
    if not file.exists():
        return {"seconds": time.time() - start}
    (_, end_of_first_step), *marks = json.loads(file.read_text())
    spans = pairwise(marks)  # the steps before the first log point warm up
    steps = [1000 * (time2 - time1) / (step2 - step1) for (step1, time1), (step2, time2) in spans]
    return {"first step s": end_of_first_step - start, "step ms": statistics.median(steps)}


def table(case: Case, readings: Readings) -> Table:
    """Return a row per program: the median and range of each number, and of the ratio to the first program."""
    names = list(dict.fromkeys(name for rounds in readings.values() for name in rounds[0]))
    rounds = len(next(iter(readings.values())))
    title = f"{case.name}: median of {rounds} (least to greatest)"
    result = Table("", *names, f"ratio of {case.metric}", title=title, title_justify="left")
    for program in case.programs:
        values = readings[program.name]
        cells = [_spread([value[name] for value in values]) if name in values[0] else "" for name in names]
        result.add_row(program.name, *cells, _spread(_ratios(case, readings, program.name)))
    return result


def _ratios(case: Case, readings: Readings, program: str) -> list[float]:
    """Return the program's number over that of the case's first program, in each round."""
    first = readings[case.programs[0].name]
    return [own[case.metric] / other[case.metric] for own, other in zip(readings[program], first, strict=True)]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.4g} ({min(values):.4g} to {max(values):.4g})"
