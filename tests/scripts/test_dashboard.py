"""The W&B workspace and report: their charts, and what scripts.dashboard sends to the server.

`python -m tests.scripts.test_dashboard > tests/golden/dashboard.txt` writes the golden file; look at the difference.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, error_line, run_here
from tests.support.wandb_server import stand_in

GOLDEN = ROOT / "tests" / "golden" / "dashboard.txt"
PROGRAM = "scripts.dashboard"


def dry_run(*arguments: str) -> dict[str, Any]:
    out, _ = run_here(*arguments, "--dry-run", program=PROGRAM)
    pages: dict[str, Any] = json.loads(out)
    return pages


def outline(pages: dict[str, Any]) -> Iterator[str]:
    """Yield a line per title, filter and chart, without what only the layout needs."""
    yield "workspace"
    section = pages["workspace"]["section"]
    yield from _filters(section["runSets"])
    for part in section["panelBankConfig"]["sections"]:
        yield f"  {part['name']}"
        yield from _charts(part["panels"])
    yield "report"
    for block in pages["report"]["blocks"]:
        yield from [f"  {child['text']}" for child in block.get("children", []) if child["text"]]
        if block["type"] == "panel-grid":
            yield from _filters(block["metadata"]["runSets"])
            yield from _charts(block["metadata"]["panelBankSectionConfig"]["panels"])


def _filters(run_sets: list[Any]) -> Iterator[str]:
    for run_set in run_sets:
        for rule in run_set["filters"]["filters"]:
            key = rule["key"]
            yield f"  runs with {key['section']}:{key['name']} {rule['op']} {json.dumps(rule['value'])}"


def _charts(panels: list[Any]) -> Iterator[str]:
    for panel in panels:
        settings = {name: value for name, value in panel["config"].items() if value not in ({}, [])}
        yield f"    {panel['viewType']} {json.dumps(settings, sort_keys=True)}"


def test_pages_have_the_charts_of_the_golden_file() -> None:
    assert list(outline(dry_run("me/cifar"))) == GOLDEN.read_text().splitlines()


def test_dry_run_is_the_same_each_time_and_ids_are_unique() -> None:
    pages = dry_run("me/cifar")
    assert pages == dry_run("other/project")
    ids = re.findall(r'"__id__": "([^"]+)"', json.dumps(pages))
    assert len(ids) == len(set(ids)) > 40


def test_options_choose_the_charts_of_sweeps_and_the_batch() -> None:
    text = json.dumps(dry_run("me/cifar", "--options", "model.width", "--batch-size", "512"))
    assert "config:model.value.width" in text
    assert "optimizer.value.lr" not in text
    assert '"value": 512' in text


def test_saves_both_pages_in_a_project_that_exists() -> None:
    """A stand-in answers the calls; W&B itself, which needs an account, is not tested."""
    with stand_in("cifar", "imagenet") as server:
        environment = os.environ | server.variables()

        def save(project: str) -> "subprocess.CompletedProcess[str]":
            command = [sys.executable, "-m", PROGRAM, project]
            return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)

        misspelt, saved = save("me/cifr"), save("me/cifar")
    assert error_line(misspelt.stderr) == "error: me/cifr: me has no project cifr; did you mean cifar?"
    workspace, report = saved.stdout.split()
    assert workspace.startswith(f"{server.address}/me/cifar?nw="), saved.stderr
    assert report.startswith(f"{server.address}/me/cifar/reports/Strategies-compared--")
    views = {view["type"]: view for view in server.views}
    expected = dry_run("me/cifar")
    assert list(views) == ["project-view", "runs"]
    assert {view["entityName"] for view in server.views} == {"me"}
    assert json.loads(views["project-view"]["spec"]) == expected["workspace"]
    assert json.loads(views["runs"]["spec"]) == expected["report"]


@pytest.mark.parametrize("name", ["cifar", "me/", "me/cifar/runs", "https://wandb.ai/me/cifar"])
def test_refuses_another_form(name: str) -> None:
    _, err = run_here(name, program=PROGRAM, code=1)
    assert error_line(err) == f"error: {name}: give ENTITY/PROJECT, such as my-team/cifar"


def test_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    _, err = run_here("me/cifar", "--dry-run", program=PROGRAM, code=1)
    assert error_line(err) == "error: this needs wandb-workspaces: pip install '.[dashboard]'"


def test_needs_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wandb.login", lambda **_: False)
    _, err = run_here("me/cifar", program=PROGRAM, code=1)
    assert error_line(err) == "error: no W&B API key is configured: run `wandb login`, or set WANDB_API_KEY"


def test_names_the_reason_if_the_server_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConnectionError("no\nroute")

    monkeypatch.setattr("wandb.login", lambda **_: True)
    monkeypatch.setattr("wandb.Api", fail)
    _, err = run_here("me/cifar", program=PROGRAM, code=1)
    assert error_line(err) == "error: me/cifar: W&B cannot list the projects of me (no route)"


def test_documented_commands_work() -> None:
    text = "\n".join(file.read_text() for file in Path(ROOT / "docs").glob("*.md"))
    found = re.findall(r"^python -m scripts.dashboard ENTITY/PROJECT *([^#\n]*)", text, re.MULTILINE)
    assert found
    for words in found:
        dry_run("me/cifar", *(word for word in words.split() if word != "--dry-run"))
    assert "usage:" in run_here("--help", program=PROGRAM)[0]


if __name__ == "__main__":
    print("\n".join(outline(dry_run("me/cifar"))))
