"""Run the parity tests, and print how far each strategy's run is from that of a single process.

A row is a strategy and a number of processes. Its two numbers are the largest relative differences in the loss of any
of the 20 steps, and in the norm of any final weight or buffer. The exit code is 1 if one exceeds the tests' tolerance.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEST = ROOT / "tests" / "engine" / "parity" / "test_parity.py"


class ParityTable:
    """A pytest plugin that collects the differences that the parity tests record."""

    def __init__(self, only: str) -> None:
        self.only = only
        self.rows: dict[str, dict[str, str]] = defaultdict(dict)

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        tests = [test for test in items if test.originalname == "test_agrees_with_single_process"]
        shipped = [test for test in tests if not test.callspec.params["length"]]  # those of 20 steps
        items[:] = [test for test in shipped if self.only in str(test.callspec.params["world"])]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        recorded: list[Any] = [value for name, value in report.user_properties if name == "parity"]
        if report.when == "call":
            for world, experiment, losses, weights in recorded:
                mark = "" if report.passed else " **fails**"
                self.rows[world][experiment] = f"{losses:.0e}, {weights:.0e}{mark}"


def main() -> int:
    """Print the table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    table = ParityTable(parser.parse_args().only)
    code = pytest.main([str(TEST), "--rootdir", str(ROOT), "-m", ""], plugins=[table])
    columns = list(dict.fromkeys(experiment for row in table.rows.values() for experiment in row))
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    lines += [[world, *(row.get(column, "") for column in columns)] for world, row in table.rows.items()]
    print("\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
