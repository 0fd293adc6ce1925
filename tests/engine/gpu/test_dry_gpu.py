"""The CUDA code path runs on fake tensors, without synchronizations, and launches as many operations as documented."""

import json
import sys
from inspect import getsourcelines
from typing import Any

import pytest

from scripts.dev.dry_gpu.__main__ import main
from scripts.dev.dry_gpu.cases import CASES
from scripts.dev.dry_gpu.library import reason_to_skip
from scripts.dev.dry_gpu.measure import PHASES
from scripts.dev.dry_gpu.report import read_rows
from tests.engine.gpu import sabotages
from tests.engine.gpu.dry_runs import QUICK
from tests.support.commands import run

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=f"{reason_to_skip()}")
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    """Return the results of the quick runs and the sabotages, by name."""
    return json.loads(run(program=["-m", "tests.engine.gpu.dry_runs"])[0].splitlines()[-1])


@pytest.mark.parametrize("title", QUICK)
def test_run_is_as_documented(results: Results, title: str) -> None:
    assert results[title]["problems"] == []
    operations = results[title]["result"]["operations"]
    launched = sum(operations["forward and loss"].values())
    assert launched < 5 if "compiled" in title else launched > 40


@pytest.mark.parametrize(
    ("sabotage", "kind"),
    [
        ("ItemInLoss", "item"),
        ("MaskInAugmentation", "nonzero or boolean mask"),
        ("MaskedAssignment", "assignment to a boolean mask"),
        ("CopyToDevice", "blocking copy from cpu to cuda"),
    ],
)
def test_detects_a_synchronization(results: Results, sabotage: str, kind: str) -> None:
    line = getsourcelines(getattr(sabotages, sabotage).synchronize)[1] + 2  # after the decorator and the signature
    expected = f"2 x {kind} in tests/engine/gpu/sabotages.py:{line} < "  # once in each of two steps
    assert [problem for problem in results["sabotaged"]["problems"] if problem.startswith(expected)]


def test_detects_another_operation(results: Results) -> None:
    assert results["default"]["result"]["operations"].keys() == {*PHASES} - {"callbacks"}
    assert results["sabotaged"]["result"]["operations"]["callbacks"] == {"_to_copy": 1}
    assert [problem for problem in results["sabotaged"]["problems"] if problem.startswith("dry-gpu.md has")]


def test_page_has_a_row_for_each_run() -> None:
    assert list(read_rows()) == [case.title for case in CASES]


def test_refuses_an_unknown_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dry_gpu", "--only", "vitt"])
    with pytest.raises(SystemExit, match="--only vitt matches no run; there are: default; "):
        main()


@pytest.mark.slow
def test_all_runs_are_as_documented() -> None:
    run(program=["-m", "scripts.dev.dry_gpu"])
