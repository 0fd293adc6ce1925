"""The first failure of several ranks is named in one line, and a rank of torchrun or SLURM names its own."""

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from onecurve.config.folder import PROJECT
from onecurve.errors import RankFailedError, UserError
from onecurve.launch import outcome
from onecurve.process.log import log_file
from onecurve.process.signals import RESIZE, Stopped
from onecurve.records.events import append_event, append_restart, read_events

LOST = "RuntimeError: gloo: connection closed by peer"


class Failed:
    """A stand-in for elastic's error; rank 0 has ended first."""

    message, local_rank = "exit code", 0

    def __init__(self, folder: Path, exitcode: int = 1) -> None:
        self.exitcode, self.error_file = exitcode, str(folder / "errors" / "0" / "error.json")

    def get_first_failure(self) -> tuple[int, "Failed"]:
        return 0, self


def report(folder: Path, rank: int, message: str, seconds: int) -> None:
    file = folder / "errors" / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"message": {"message": message, "extraInfo": {"py_callstack": "Traceback"}}}))
    os.utime(file, (seconds, seconds))


def first_failure(folder: Path, exitcode: int = 1) -> Exception:
    return outcome.first_failure(Failed(folder, exitcode), str(folder), folder / "errors")


def test_user_error_in_the_traceback_of_a_spawned_process(tmp_path: Path) -> None:
    report(tmp_path, 0, LOST, seconds=20)
    report(tmp_path, 1, "ProcessRaisedException: Traceback:\n  File\nsrc.errors.UserError: set x=1\n", seconds=10)
    error = first_failure(tmp_path)
    assert isinstance(error, UserError)
    assert str(error) == "set x=1"


@pytest.mark.parametrize("exitcode", [-9, 3])
def test_rank_that_dies_reports_nothing(exitcode: int, tmp_path: Path) -> None:
    if exitcode < 0:
        report(tmp_path, 1, LOST, seconds=10)
    error = first_failure(tmp_path, exitcode)
    assert isinstance(error, RankFailedError)
    assert error.dead_rank == 0
    assert str(error).startswith("rank 0 died (exit code)")


def end(error: Exception, rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what a rank of torchrun prints when it fails."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(outcome, "_EXIT_DELAY", 0.2)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    monkeypatch.setenv("RANK", str(rank))
    terminal = io.StringIO()
    with pytest.raises(SystemExit, match="1"):
        outcome.exit_rank(error, str(folder / "run"), rank, terminal)
    message: Any = json.loads((folder / "error.json").read_text())["message"]["message"]
    assert message == f"{type(error).__name__}: {error}", "the report for torchrun"
    return terminal.getvalue()


@pytest.mark.parametrize("rank", [0, 1])
def test_user_error_is_printed_by_rank_zero_which_removes_the_run_folder(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait, because torchrun ends rank zero when one exits."""
    log_file(tmp_path / "run", rank).parent.mkdir(parents=True)
    delays: list[float] = []
    monkeypatch.setattr(outcome.time, "sleep", delays.append)
    printed = end(UserError("set x=1"), rank, tmp_path, monkeypatch)
    assert delays == [0.2] * (rank > 0)
    assert printed == ("" if rank else "error: set x=1\n")
    assert (tmp_path / "run").exists() == (rank > 0)


LIGHTNING = '  File "/x/.venv/lib/python3.11/site-packages/lightning/call.py", line 3, in call\n    f(\n    ^^\n'
ENGINE = f'  File "{PROJECT}/engine/onecurve/run/module.py", line 4, in log_step\n    self.log()\n'
JSON = f'  File "{json.__file__}", line 5, in loads\n  [Previous line repeated 2 more times]\n'
MODEL = f'  File "{PROJECT}/src/models/mlp.py", line 6, in forward\n    self.net(x)\n'
FOLDED = "  ... frames of libraries and of onecurve ...\n"
HEADER, MESSAGE = "Traceback (most recent call last):\n", "ValueError: a\n  b\n"


def test_folds_frames_that_are_not_the_users_in_each_cause() -> None:
    cause = "\nThe above exception was the direct cause of the following exception:\n\n"
    trace = HEADER + LIGHTNING + ENGINE + MODEL + JSON + MESSAGE + cause + HEADER + LIGHTNING + MESSAGE
    folded = HEADER + FOLDED + MODEL + FOLDED + MESSAGE + cause + HEADER + FOLDED + MESSAGE
    assert outcome.fold_frames(trace) == folded


def test_a_bug_of_the_template_keeps_its_traceback() -> None:
    trace = HEADER + LIGHTNING + ENGINE + MESSAGE
    assert outcome.fold_frames(trace) == trace


def test_a_value_for_debugging_that_crashes_torch_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "unset" not in str(first_failure(tmp_path, -11))
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    assert "rank 0 died (exit code); unset TORCH_DISTRIBUTED_DEBUG=DETAIL; its log" in str(first_failure(tmp_path, -11))


def test_ranks_that_make_room_for_a_device_have_got_no_signal(tmp_path: Path) -> None:
    append_event(tmp_path, "start", 0)
    append_restart(tmp_path, Stopped(RESIZE), "")
    assert [event["reason"] for event in read_events(tmp_path)] == [None, "resized", "resized"]
