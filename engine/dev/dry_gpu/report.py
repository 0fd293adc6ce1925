"""The table of all dry runs, as it is kept in docs/benchmarks/dry-gpu.md."""

from collections.abc import Mapping, Sequence

from engine.dev.dry_gpu.cases import KNOWN_SYNCHRONIZATIONS, Case
from engine.dev.dry_gpu.measure import PHASES
from engine.dev.dry_gpu.run import Result
from engine.dev.shared.process import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "dry-gpu.md"
_COLUMNS = ["run", *PHASES, "all", "collectives", "synchronizations", "at log points", "compiled"]
HEADER = ["| " + " | ".join(_COLUMNS) + " |", "| --- |" + " ---: |" * (len(_COLUMNS) - 1)]


def row(case: Case, result: Result) -> str:
    """Return the case's line of the table: its operations by phase, collectives and synchronizations per step."""
    counts = [sum(result.operations.get(phase, {}).values()) for phase in PHASES]
    waits = sum(result.synchronizations.values()) // max(1, result.steps)
    cells = [
        *counts,
        sum(counts),
        sum(result.collectives.values()),
        waits,
        sum(result.at_log_point.values()),
        result.compiled,
    ]
    return f"| {case.title} | " + " | ".join(map(str, cells)) + " |"


def problems(case: Case, result: Result, kept: Mapping[str, str]) -> list[str]:
    """Return what is wrong with a result: an error, an unknown synchronization, or a row that differs from the page."""
    if result.error:
        return [result.error]
    found = [
        f"{count} x {wait}"
        for wait, count in result.synchronizations.items()
        if not any(known in wait for known in KNOWN_SYNCHRONIZATIONS)
    ]
    new, old = row(case, result), kept.get(case.title)
    if new != old:
        found += [f"{PAGE.name} has {old or 'no such row'}", f"this run gives {new}"]
    return found


def read_rows() -> dict[str, str]:
    """Return the rows of the page by the title of their case."""
    lines = PAGE.read_text().splitlines()
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ") and line not in HEADER}


def write_rows(rows: Sequence[str]) -> None:
    """Replace the table of the page."""
    before, _, after = PAGE.read_text().partition(HEADER[0])
    text = after.splitlines()
    end = next((number for number, line in enumerate(text) if number and not line.startswith("|")), len(text))
    PAGE.write_text("\n".join([before + HEADER[0], HEADER[1], *rows, *text[end:]]) + "\n")
