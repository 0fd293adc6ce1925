"""The trace of a run has the format of Perfetto, and shows what the timeline recorded."""

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT, error_line, run_here
from tests.support.pool import Pool
from tests.support.runs import compose, fit

# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU: the fields of each phase.
FIELDS = {
    "M": {"name", "pid", "args"},
    "X": {"name", "pid", "tid", "ts", "dur", "args"},
    "C": {"name", "pid", "ts", "args"},
    "i": {"name", "pid", "tid", "ts", "s", "args"},
}
RUN = ["model=mlp", "model.hidden=[16]", "data.batch_size=64", "trainer.max_steps=6", "trainer.log_every_n_steps=2"]
EVENTS: list[dict[str, Any]] = [
    {"event": "start", "step": None, "world_size": 2},
    {"event": "stopped", "step": 4, "reason": "SIGTERM"},
]


@pytest.fixture(scope="module")
def folder(pool: Pool, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of a pipeline on two ranks, with events, and one line that a kill has cut."""
    folder = tmp_path_factory.mktemp("trace") / "run"
    pool.run(2, fit, compose(folder, *small, *RUN, "strategy=pipeline", "trainer.devices=2"))
    file = folder / "timeline" / "rank1.jsonl"
    process = json.loads(file.read_text().splitlines()[0])
    with (folder / "events.jsonl").open("w") as stream:
        for number, event in enumerate(EVENTS):
            stream.write(json.dumps({"time": process["start"] + number} | event) + "\n")
    with file.open("a") as stream:
        stream.write('{"kind": "int')
    with (folder / "events.jsonl").open("a") as stream:
        stream.write('{"event": "st\n')
    return folder


@pytest.fixture(scope="module")
def events(folder: Path) -> list[dict[str, Any]]:
    out, _ = run_here(str(folder), program="scripts.trace")
    assert out == f"{folder}/trace.json: open it in https://ui.perfetto.dev\n"
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def slices(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    found = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def test_has_the_format(events: list[dict[str, Any]]) -> None:
    for event in events:
        assert event.keys() >= FIELDS[event["ph"]], event
        assert event.get("ts", 0) >= -1e6, "the start of the first process is zero"
        assert event.get("dur", 0) >= 0
        assert isinstance(event["args"], dict)
        if event["ph"] == "C":
            assert all(isinstance(value, float | int) for value in event["args"].values())


@pytest.mark.parametrize("rank", [0, 1])
def test_slices_of_a_track_are_nested(rank: int, events: list[dict[str, Any]]) -> None:
    """Perfetto shows no slice that begins within another one and ends after it."""
    ends: list[float] = []
    for event in slices(events, rank):
        while ends and ends[-1] <= event["ts"] + 1:  # a microsecond
            ends.pop()
        assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1, event
        ends.append(event["ts"] + event["dur"])


@pytest.mark.parametrize("rank", [0, 1])
def test_has_a_track_of_each_rank(rank: int, events: list[dict[str, Any]]) -> None:
    names = Counter(event["name"] for event in slices(events, rank))
    intervals = {name for name in names if "step" in name}
    assert intervals == {"steps 1 to 1", "steps 2 to 2", "steps 3 to 4", "steps 5 to 6", "after step 6"}
    assert names["validation"] >= 1
    assert names["save"] >= 1
    passes = [event for event in slices(events, rank) if "microbatch" in event["args"]]
    assert {event["name"] for event in passes} == {f"{kind}{number}" for kind in "FB" for number in range(4)}
    assert {event["args"]["step"] for event in passes} == {3, 5}
    assert {event["args"]["stage"] for event in passes} == {rank}
    (track,) = [event for event in events if event["name"] == "thread_name" and event["tid"] == rank]
    assert track["args"]["name"].startswith(f"rank {rank} (")
    counters = [event for event in events if event["name"] == f"rank {rank}: ms per step"]
    assert len(counters) == 4
    assert counters[-1]["args"].keys() >= {"data", "forward_backward", "communication", "optimizer"}


def test_passes_of_the_ranks_are_on_one_clock(events: list[dict[str, Any]]) -> None:
    """A micro-batch reaches the second stage after the first one."""
    for step in (3, 5):
        starts = {
            rank: next(e["ts"] for e in slices(events, rank) if e["name"] == "F0" and e["args"]["step"] == step)
            for rank in (0, 1)
        }
        assert starts[0] < starts[1]


def test_has_the_events_of_the_run(events: list[dict[str, Any]]) -> None:
    instants = [event for event in events if event["ph"] == "i"]
    assert [(event["name"], event["args"]) for event in instants] == [
        ("start", {"step": None, "world_size": 2}),
        ("stopped", {"step": 4, "reason": "SIGTERM"}),
    ]
    assert all(later["ts"] - earlier["ts"] == pytest.approx(1e6) for earlier, later in pairwise(instants))


def test_documented_command_works(folder: Path, tmp_path: Path) -> None:
    (arguments,) = re.findall(r"^python -m scripts.trace (.*)$", (ROOT / "docs/runs.md").read_text(), re.MULTILINE)
    words = arguments.replace("RUN_DIR", str(folder)).replace("trace.json", f"{tmp_path}/trace.json").split()
    run_here(*words, program="scripts.trace")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_errors_are_one_line(folder: Path, tmp_path: Path) -> None:
    for words, message in (
        ([str(tmp_path)], "has no timeline: give the folder of a run with callbacks.timeline"),
        ([str(folder), "--output=/proc/no/x"], "--output=/proc/no/x cannot"),
    ):
        _, err = run_here(*words, program="scripts.trace", code=1)
        assert message in error_line(err)
