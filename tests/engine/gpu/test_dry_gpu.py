"""The CUDA code path runs on fake tensors, without synchronizations, and launches as many operations as documented."""

import json
import sys
from collections.abc import Iterable
from inspect import getsourcelines
from pathlib import Path
from typing import Any

import pytest

from engine.dev.dry_gpu.__main__ import main
from engine.dev.dry_gpu.cases import CASES
from engine.dev.dry_gpu.library import reason_to_skip
from engine.dev.dry_gpu.measure import PHASES
from engine.dev.dry_gpu.report import read_rows
from tests.engine.gpu import sabotages
from tests.engine.gpu.dry_runs import QUICK
from tests.support.commands import run
from tests.support.plans import planned_collectives
from tests.support.runs import compose

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=f"{reason_to_skip()}")
Results = dict[str, dict[str, Any]]
UNPLANNED = ("ddp, gan", "ddp, powersgd", "ddp, post_local_sgd")
PLANNED = {case.title: case for case in CASES if case.world > 1 and case.name not in UNPLANNED}


@pytest.fixture(scope="module")
def results() -> Results:
    """Return the results of the quick runs and the sabotages, by name."""
    return dry_runs()


def dry_runs(*titles: str) -> Results:
    return json.loads(run(*titles, program=["-m", "tests.engine.gpu.dry_runs"])[0].splitlines()[-1])


def check_collectives(titles: Iterable[str], results: Results, folder: Path) -> None:
    """Check that these runs have the collectives of the plan for their rank: kind, bytes, ranks and number."""
    found, expected = {}, {}
    for case in [PLANNED[title] for title in titles]:
        cfg = compose(folder, *case.settings(), "hardware=h100", f"data.root={folder}")
        words = [word for word in case.overrides.split() if word.startswith("strategy")] or ["strategy=auto"]
        [expected[case.title]] = planned_collectives(cfg, words, [case.rank])
        found[case.title] = results[case.title]["result"]["collectives"]
    assert found == expected


@pytest.mark.parametrize("title", QUICK)
def test_run_is_as_documented(results: Results, title: str) -> None:
    assert results[title]["problems"] == []
    assert count_launched(results[title]) > 40


@pytest.mark.slow
def test_a_compiled_step_launches_few_operations() -> None:
    title = "compiled, speedrun"
    result = dry_runs(title)[title]
    assert result["problems"] == []
    assert count_launched(result) < 5


def count_launched(result: dict[str, Any]) -> int:
    """Return the number of operations in the forward pass and the loss."""
    return sum(result["result"]["operations"]["forward and loss"].values())


@pytest.mark.slow
def test_collectives_are_those_of_the_plan(results: Results, folder: Path) -> None:
    """tests/engine/extras/plan compares plans with real runs."""
    check_collectives([title for title in QUICK if title in PLANNED], results, folder)


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
    run(program=["-m", "engine.dev.dry_gpu"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "hsdp", "hybrid", "pipeline"])
def test_collectives_of_all_runs_are_those_of_the_plan(name: str, folder: Path) -> None:
    titles = [title for title in PLANNED if title.startswith(name) and title not in QUICK]
    check_collectives(titles, dry_runs(*titles), folder)
