"""The record of a run's events, and the last step in its metrics, by files that were written by hand."""

import json
import os
from contextlib import suppress
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest

from onecurve.errors import UserError
from onecurve.process.signals import RESIZE, Stopped
from onecurve.records import events
from onecurve.records.events import (
    append_end,
    append_event,
    end_of,
    failure_recorded,
    logged_steps,
    read_events,
)

METRICS = "step,epoch,loss\n9,0,1.5\n"


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events.time, "time", lambda: 1000.5)


def write(folder: Path, *names: str, **details: Any) -> None:
    """Write these events, all with the same details."""
    lines = [json.dumps({"event": name, "reason": f"the reason of {name}"} | details) for name in names]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))


def names(folder: Path) -> list[str]:
    return [event["event"] for event in read_events(folder)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["start"], {"time": 1000.5, "event": "start", "step": None, "reason": None}),
        (["start", 0], {"time": 1000.5, "event": "start", "step": 0, "reason": None}),
        (["stopped", 7, "SIGTERM", 3.5], {"time": 3.5, "event": "stopped", "step": 7, "reason": "SIGTERM"}),
    ],
)
def test_an_event_has_a_time_and_a_step(arguments: list[Any], expected: dict[str, Any], tmp_path: Path) -> None:
    append_event(tmp_path, *arguments)
    assert read_events(tmp_path) == [expected]


def test_an_event_has_details(tmp_path: Path) -> None:
    append_event(str(tmp_path), "start", world_size=2)
    append_event(tmp_path, "finished")
    assert (tmp_path / "events.jsonl").read_text().count("\n") == 2
    assert read_events(tmp_path)[0]["world_size"] == 2
    assert names(tmp_path) == ["start", "finished"]


def test_a_run_without_a_record_has_no_event(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    assert read_events(tmp_path / "no folder") == []


def test_an_event_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    append_event(tmp_path / "no folder", "start")
    (message,) = caplog.messages
    assert message.startswith("events.jsonl lacks an event: [Errno 2] No such file")


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([], []),
        (["start"], ["start", "failed"]),
        (["start", "stopped", "resume"], ["start", "stopped", "resume", "failed"]),
        (["start", "stopped"], ["start", "stopped"]),
        (["start", "finished"], ["start", "finished"]),
        (["start", "killed", "restart"], ["start", "killed", "restart"]),
        (["start", "event of a fork"], ["start", "event of a fork", "failed"]),
    ],
)
def test_an_end_follows_a_start(before: list[str], expected: list[str], tmp_path: Path) -> None:
    write(tmp_path, *before)
    (tmp_path / "metrics.csv").write_text(METRICS)
    append_end(tmp_path, "failed", "why", 3.5)
    assert names(tmp_path) == expected
    if before != expected:
        assert read_events(tmp_path)[-1] == {"time": 3.5, "event": "failed", "step": 10, "reason": "why"}


@pytest.mark.parametrize(("record", "metrics", "expected"), [(100, 200, 200), (200, 100, 200), (200, None, 200)])
def test_a_kill_has_the_time_of_the_last_write(record: int, metrics: int | None, expected: int, tmp_path: Path) -> None:
    write(tmp_path, "start")
    os.utime(tmp_path / "events.jsonl", (record, record))
    if metrics is not None:
        (tmp_path / "metrics.csv").write_text(METRICS)
        os.utime(tmp_path / "metrics.csv", (metrics, metrics))
    with failure_recorded(tmp_path):
        pass
    killed = read_events(tmp_path)[-1]
    step = None if metrics is None else 10
    assert killed == {"time": expected, "event": "killed", "step": step, "reason": "no end was recorded"}


def test_a_new_run_was_not_killed(tmp_path: Path) -> None:
    with failure_recorded(tmp_path):
        pass
    assert not (tmp_path / "events.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        ("step,epoch,loss\n", None),
        ("step,epoch,loss\n0,0,1.5\n", 1),
        (METRICS, 10),
        ("step,epoch,loss\n9,0,1.5\n19,0,1.5\n", 20),
        ("step,epoch,loss\n9,0,1.5\n19,0,1.5", 10),
        ("step,epoch,loss\n9,0,1.5\n1", 10),
        ("step,epoch,loss\n9,0,1.5\n,,1.5\n", 10),
        ("step,epoch,loss,test/loss\n9,0,1.5,\n20,0,,1.0\n", 10),
        ("step,epoch,loss,test/loss\n9,0,1.5,\n20,0,1.5,1.0\n", 21),
        ("step,epoch,loss,test_class/cat\n9,0,1.5,\n10,0,,1.0\n", 10),
        ("step,epoch,lr\n9,0,\n", None),
        ("step,epoch,step_loss\n9,0,1.5\n", 10),
        ("step,epoch,test/acc,val/acc\n9,0,0.5,0.5\n", 10),
    ],
)
def test_steps_of_the_last_complete_row(text: str, expected: int | None, tmp_path: Path) -> None:
    assert logged_steps(tmp_path) is None
    (tmp_path / "metrics.csv").write_text(text)
    assert logged_steps(tmp_path) == expected


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (Stopped(SIGTERM), ("stopped", "SIGTERM")),
        (Stopped(RESIZE), ("stopped", "resized")),
        (KeyboardInterrupt(), ("stopped", "SIGINT")),
        (UserError("one line"), ("failed", "one line")),
        (UserError("a traceback\nof two\nerror: one line\n"), ("failed", "error: one line")),
        (ValueError("first\nsecond\nthird"), ("failed", "ValueError: first")),
        (ValueError(), ("failed", "ValueError: ")),
    ],
)
def test_the_end_of_a_run_by_an_error(error: BaseException, end: tuple[str, str]) -> None:
    assert end_of(error) == end


def test_a_kill_and_a_stop_are_recorded(tmp_path: Path) -> None:
    write(tmp_path, "start")
    with failure_recorded(tmp_path):
        append_event(tmp_path, "start")
    with suppress(KeyboardInterrupt), failure_recorded(tmp_path):
        append_event(tmp_path, "start")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["start", "killed", "start", "killed", "start", "stopped"]
