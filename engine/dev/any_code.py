"""Train the modules and loaders that the tests have of other people's kind, and print on which hardware each is equal.

`bits` is equality of every byte of metrics.csv, weights and moments with one process, with `bit_exact=true`; `1e-9` is
that of losses and weights in float64 without it. A kind that does not divide has no such cell: it ends in one line. The
exit code is 1 if a run differs.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ("engine/bits/test_habits.py", "engine/data/test_any_loader.py")
NAMES = ("test_has_the_bits_of_one_process", "test_trains_the_same")


class Table:
    """A pytest plugin that collects the outcomes by kind and place."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        items[:] = [item for item in items if item.originalname in NAMES]
        for item in items:
            options = item.callspec.params
            kind, place = (
                options.get("kind", options.get("name")),
                options.get("place", f"ddp x{options.get('devices')}"),
            )
            cell = "1e-9" if options.get("way") == "together" else "bits"
            item.user_properties.append(("cell", (kind, place, cell)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            cells: list[Any] = [value for _, value in report.user_properties]
            for kind, place, cell in cells:
                self.rows[kind][place].append(cell if report.passed else "**differs**")


def main() -> int:
    """Print the table in Markdown."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    table = Table()
    files = [str(ROOT / "tests" / test) for test in TESTS]
    code = pytest.main([*files, "--rootdir", str(ROOT), "-m", ""], plugins=[table])
    places = sorted({place for row in table.rows.values() for place in row})
    lines = [["", *places], ["---"] * (len(places) + 1)]
    lines += [[kind, *(", ".join(row.get(place, [])) for place in places)] for kind, row in table.rows.items()]
    print("\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
