"""The report: hardware, versions and a row per case, in Markdown."""

import shlex
import sys
from collections import Counter
from datetime import date
from pathlib import Path
from typing import NamedTuple

from src.engine.utils.files import atomic_write

_LONGEST = 160  # characters of a cell


class Outcome(NamedTuple):
    """The outcome of a case: its verdict is `ok`, `FAILED` or `not here`."""

    name: str
    verdict: str
    seconds: float
    figure: str


def markdown(outcomes: list[Outcome], hardware: dict[str, str]) -> str:
    """Return the page; FAILED stands out in it."""
    command = shlex.join(["python", "-m", "scripts.dev.gpu_check", *sys.argv[1:]])
    counts = Counter(outcome.verdict for outcome in outcomes)
    verdicts = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    lines = [
        "# GPU check",
        "",
        f"Written by `{command}` on {date.today()}: {verdicts}. [Cases](gpu-check.md) explains the cases.",
        "",
        "| | |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in hardware.items()),
        "",
        "| case | verdict | seconds | figure |",
        "| --- | --- | --- | --- |",
        *(_row(outcome) for outcome in outcomes),
    ]
    return "\n".join(lines) + "\n"


def _row(outcome: Outcome) -> str:
    verdict = f"**{outcome.verdict}**" if outcome.verdict == "FAILED" else outcome.verdict
    figure = " ".join(outcome.figure.split()).replace("|", "\\|")
    shown = figure if len(figure) <= _LONGEST else figure[: _LONGEST - 3] + "..."
    return f"| {outcome.name} | {verdict} | {outcome.seconds:.0f} | {shown} |"


def write(text: str, file: Path) -> None:
    """Write the page to the file at once, so that a stop leaves a complete one."""
    with atomic_write(file) as temporary:
        temporary.write_text(text)
