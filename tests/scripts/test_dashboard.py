"""The W&B workspace: its charts, and what scripts.dashboard sends to the server.

`python -m tests.scripts.test_dashboard > tests/golden/dashboard.txt` writes the golden file; look at the difference.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.commands import ROOT, error_line, run_here
from tests.support.wandb_server import stand_in

GOLDEN = ROOT / "tests" / "golden" / "dashboard.txt"
PROGRAM = "scripts.dashboard"


def dry_run(*arguments: str) -> dict[str, Any]:
    out, _ = run_here(*arguments, "--dry-run", program=PROGRAM)
    workspace: dict[str, Any] = json.loads(out)
    return workspace


def outline(workspace: dict[str, Any]) -> Iterator[str]:
    """Yield a line per title, filter and chart, without what only the layout needs."""
    yield from _filters(workspace["section"]["runSets"])
    for part in workspace["section"]["panelBankConfig"]["sections"]:
        yield f"  {part['name']}"
        yield from _charts(part["panels"])


def _filters(run_sets: list[Any]) -> Iterator[str]:
    for run_set in run_sets:
        for rule in run_set["filters"]["filters"]:
            key = rule["key"]
            yield f"  runs with {key['section']}:{key['name']} {rule['op']} {json.dumps(rule['value'])}"


def _charts(panels: list[Any]) -> Iterator[str]:
    for panel in panels:
        settings = {name: value for name, value in panel["config"].items() if value not in ({}, [])}
        yield f"    {panel['viewType']} {json.dumps(settings, sort_keys=True)}"


def test_workspace_has_the_charts_of_the_golden_file() -> None:
    assert list(outline(dry_run("me/cifar"))) == GOLDEN.read_text().splitlines()


def test_dry_run_is_the_same_each_time_and_ids_are_unique() -> None:
    workspace = dry_run("me/cifar")
    assert workspace == dry_run("other/project")
    ids = re.findall(r'"__id__": "([^"]+)"', json.dumps(workspace))
    assert len(ids) == len(set(ids)) > 20


def test_options_choose_the_charts_of_sweeps() -> None:
    text = json.dumps(dry_run("me/cifar", "--options", "model.width"))
    assert "config:model.value.width" in text
    assert "optimizer.value.lr" not in text


def test_saves_the_workspace_in_a_project_that_exists() -> None:
    """A stand-in answers the calls; W&B itself, which needs an account, is not tested."""
    with stand_in("cifar", "imagenet") as server:
        environment = os.environ | server.variables()

        def save(project: str) -> "subprocess.CompletedProcess[str]":
            command = [sys.executable, "-m", PROGRAM, project]
            return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)

        misspelt, saved = save("me/cifr"), save("me/cifar")
    assert error_line(misspelt.stderr) == "error: me/cifr: me has no project cifr; did you mean cifar?"
    assert saved.stdout.startswith(f"{server.address}/me/cifar?nw="), saved.stderr
    (view,) = server.views
    assert (view["type"], view["entityName"]) == ("project-view", "me")
    assert json.loads(view["spec"]) == dry_run("me/cifar")


@pytest.mark.parametrize(
    ("name", "has_key", "message"),
    [
        ("cifar", True, "cifar: give ENTITY/PROJECT, such as my-team/cifar"),
        ("https://wandb.ai/me/cifar", True, "https://wandb.ai/me/cifar: give ENTITY/PROJECT, such as my-team/cifar"),
        ("me/cifar", False, "no W&B API key is configured: run `wandb login`, or set WANDB_API_KEY"),
        ("me/cifar", True, "me/cifar: W&B cannot list the projects of me (no route)"),
    ],
)
def test_errors_are_one_line(name: str, has_key: bool, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.login", lambda **_: has_key)
    monkeypatch.setattr("wandb.Api", Mock(side_effect=ConnectionError("no\nroute")))
    _, err = run_here(name, program=PROGRAM, code=1)
    assert error_line(err) == f"error: {message}"


def test_documented_commands_work() -> None:
    text = (ROOT / "docs" / "dashboards.md").read_text()
    found = re.findall(r"^python -m scripts.dashboard ENTITY/PROJECT *([^#\n]*)", text, re.MULTILINE)
    assert found
    for words in found:
        dry_run("me/cifar", *(word for word in words.split() if word != "--dry-run"))


if __name__ == "__main__":
    print("\n".join(outline(dry_run("me/cifar"))))
