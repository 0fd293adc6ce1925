"""Print the curves of several runs side by side.

Each argument is a run folder. A row is an epoch. The last two rows are each run's differences from the first run.
"""

import argparse
import csv
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


def curve(folder: Path, metric: str) -> list[float]:
    """Return the metric's logged values, in order."""
    with (folder / "metrics.csv").open(newline="") as stream:
        return [float(row[metric]) for row in csv.DictReader(stream) if row.get(metric)]


def table(folders: list[Path], metric: str) -> Table:
    """Return a table with a column per run, cut to the shortest run."""
    curves = [curve(folder, metric) for folder in folders]
    result = Table("", *(folder.name for folder in folders), title=metric)
    for number, values in enumerate(zip(*curves, strict=False)):
        result.add_row(str(number), *(f"{value:.4f}" for value in values))
    result.add_section()
    gaps = [[abs(a - b) for a, b in zip(values, curves[0], strict=False)] for values in curves]
    result.add_row("mean gap", *(f"{sum(gap) / max(1, len(gap)):.4f}" for gap in gaps))
    result.add_row("largest gap", *(f"{max(gap, default=0.0):.4f}" for gap in gaps))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--metric", default="val/acc", help="a column of metrics.csv (default: %(default)s)")
    arguments = parser.parse_args()
    for folder in arguments.runs:
        if not (folder / "metrics.csv").is_file():
            sys.exit(f"error: {folder} is no run folder: it has no metrics.csv")
        if not curve(folder, arguments.metric):
            sys.exit(f"error: --metric={arguments.metric}: {folder} has none logged")
    Console().print(table(arguments.runs, arguments.metric))


if __name__ == "__main__":
    main()
