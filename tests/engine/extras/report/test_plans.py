"""What was planned: the page of a plan, and the plan beside what a run has recorded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from onecurve.extras.report import write_page_of
from onecurve.extras.report.plan_page import write_plan_page
from tests.support.run_folders import PLAN, write_run


def figures(page: str) -> list[Any]:
    """Return the figures of a page."""
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page)]


def test_page_of_a_plan(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    page = write_plan_page(folder, PLAN).read_text()
    assert page.index("fsdp") < page.index("needs 3.0 GiB of 2.0")
    assert "pipeline microbatches=8 and 1 more" in page
    assert page.count("&lt;b&gt; too many") == 1
    memory, seconds = figures(page)
    assert {part["name"]: part["x"] for part in memory["data"]} == {"weights": [0.5, 1.5], "activations": [0.5, 1.5]}
    assert [line["x0"] for line in memory["layout"]["shapes"]] == [2.0]
    assert [part["x"] for part in seconds["data"]] == [[10, 12.5], [10, 12.5]]
    write_plan_page(folder, PLAN | {"columns": [], "candidates": []})  # no strategy is possible


def test_simulated_passes_are_above_the_recorded_ones(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    page = write_page_of(folder).read_text()
    assert "The bubble is 20.0% of the simulated step, and 20.0% of the recorded one." in page
    assert "1.25 of the planned 120 ms" in page
    (chart,) = [figure for figure in figures(page) if figure["data"][0].get("name") == "bubble"]
    assert list(dict.fromkeys(row for part in chart["data"] for row in part["y"])) == [
        *("simulated, rank 0", "simulated, rank 1", "recorded, rank 0", "recorded, rank 1")
    ]
    simulated, recorded = (part for part in chart["data"] if part["name"] == "backward")
    assert simulated["base"] == pytest.approx(recorded["base"], abs=1e-3)  # milliseconds; UNIX times are rounded


def test_passes_of_virtual_ranks(tmp_path: Path) -> None:
    """With bit_exact=true they are the micro-batches, also if strategy.microbatches is too small for 1f1b."""
    folder = write_run(tmp_path / "run")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["strategy"] |= {"schedule": "1f1b", "microbatches": 1}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"bit_exact": True, "virtual_ranks": 4}))
    assert "Passes of 1f1b" in write_page_of(folder).read_text()


def test_simulated_passes_wait_for_nothing_but_their_inputs(tmp_path: Path) -> None:
    """A rank whose clock is late by 30 ms seems to wait; a step of another schedule is left out."""
    folder = write_run(tmp_path / "run")
    file = folder / "timeline" / "rank1.jsonl"
    *others, last = file.read_text().splitlines()
    line = json.loads(last)
    other_schedule = line | {"step": 20, "passes": line["passes"][::-2]}
    lines = [*others, json.dumps(line | {"start": line["start"] + 0.03}), json.dumps(other_schedule)]
    file.write_text("\n".join(lines) + "\n")
    page = write_page_of(folder).read_text()
    assert "The bubble is 20.0% of the simulated step, and 25.0% of the recorded one." in page
    file.unlink()
    assert "simulated step" not in write_page_of(folder).read_text()
