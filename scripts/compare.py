"""Print the curves of several runs side by side, and say whether runs of one experiment have one curve.

Each argument is a run folder; files are left out, so that runs/* may hold pages as well. A row is a step at which all
runs have the metric. The last rows are the differences from the first run, also those of train/loss. Below them are
the options by which experiments differ. The exit status is 1 if losses of two runs of one experiment part by more than
rounding in their precision explains; with bit_exact=true, if any values do, whatever --metric shows.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from onecurve.errors import as_typed
from onecurve.extras.report.agreement import shared_metrics, verdicts
from onecurve.extras.report.run_folder import RunFolder

_SHOWN = 8  # options that differ, of each run


def table(runs: list[RunFolder], metric: str) -> Table:
    """Return a table with a numbered column per run and a row for each step that all runs have."""
    steps, logged = shared_values(runs, metric)
    result = Table("step", *map(str, range(1, len(runs) + 1)), title=metric)
    for step, values in zip(steps, zip(*logged, strict=True), strict=True):
        result.add_row(f"{step:.0f}", *(f"{value:.4f}" for value in values))
    for name in dict.fromkeys([metric, "train/loss"]):
        if all(name in run.curves for run in runs):
            _, logged = shared_values(runs, name)
            gaps = [[abs(value - first) for value, first in zip(values, logged[0], strict=True)] for values in logged]
            result.add_section()
            suffix = f", {name}" if name != metric else ""
            result.add_row(f"mean gap{suffix}", *(f"{sum(gap) / max(1, len(gap)):.4f}" for gap in gaps))
            result.add_row(f"largest gap{suffix}", *(f"{max(gap, default=0.0):.4f}" for gap in gaps))
    result.add_section()
    result.add_row("experiment", *(run.experiment or "unknown" for run in runs))
    return result


def shared_values(runs: list[RunFolder], metric: str) -> tuple[list[float], list[list[float]]]:
    """Return the steps at which all runs have logged the metric, and its values there, for each run."""
    logged = [dict(zip(*run.curves[metric], strict=True)) for run in runs]
    steps = sorted(set.intersection(*({*values} for values in logged)))
    return steps, [[values[step] for step in steps] for values in logged]


def changes(run: RunFolder, first: RunFolder) -> str:
    """Return the options by which the experiment of a run differs from that of another run, with both values."""
    for one, name in ((run, "it"), (first, "that one")):
        earlier = [event["experiment"] for event in one.events if event.get("experiment") not in (None, one.experiment)]
        if earlier:
            return f"what {name} was before it went on: experiment {earlier[0]}"
    names = run.experiment_options.keys() | first.experiment_options.keys()
    changed = [name for name in sorted(names) if run.config.get(name) != first.config.get(name)]
    values = [f"{name}={as_typed(run.config.get(name))} ({as_typed(first.config.get(name))})" for name in changed]
    rest = [f"and {len(values) - _SHOWN} more"] if len(values) > _SHOWN else []
    return ", ".join(values[:_SHOWN] + rest) or "no option, but its code or its training data"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument(
        "--metric", help="a column of metrics.csv (default: optimized_metric of the first run, or a loss)"
    )
    arguments = parser.parse_args()
    folders = [folder for folder in arguments.runs if not folder.is_file()] or arguments.runs
    for folder in folders:
        if not (folder / "metrics.csv").is_file():
            is_run = (folder / "events.jsonl").is_file()
            sys.exit(f"error: {folder} {'has logged nothing' if is_run else 'is no run folder: it has no metrics.csv'}")
    runs = [RunFolder(folder) for folder in folders]
    shared = shared_metrics(runs)
    preferred = [runs[0].config.get("optimized_metric"), *shared]
    metric = arguments.metric or next((name for name in preferred if name in shared), "val/acc")
    if missing := [run.path for run in runs if metric not in run.curves]:
        logged = f"; all runs have {', '.join(shared)}" if shared else ""
        sys.exit(f"error: --metric={metric}: {missing[0]} has none logged{logged}")
    for number, folder in enumerate(folders, 1):
        print(f"{number}: {folder}")
    Console().print(table(runs, metric))
    if len({run.experiment for run in runs}) > 1:
        print("Runs of different experiments are not held to one curve.")
    for number, run in enumerate(runs, 1):
        if run.experiment and runs[0].experiment and run.experiment != runs[0].experiment:
            print(f"{number} differs from 1 in {changes(run, runs[0])}.")
    found = verdicts(runs, [str(folder) for folder in folders])
    for verdict in found:
        print(verdict.sentence)
    sys.exit(int(any(verdict.parts for verdict in found)))


if __name__ == "__main__":
    main()
