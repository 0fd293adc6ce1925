"""A rank that torchrun or SLURM started ends with one line, also if other ranks wait for it."""

import io
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from src.launch import rank_exit
from src.utils import signals
from src.utils.errors import UserError
from src.utils.rank_log import log_file

LOST = RuntimeError("gloo: connection closed by peer")


def end(error: Exception, rank: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what the failed rank prints."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(rank_exit, "_REPORT_DELAY", 0.1)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
    monkeypatch.setenv("RANK", str(rank))
    terminal = io.StringIO()
    with pytest.raises(SystemExit, match="1"):
        rank_exit.exit_started_rank(error, str(folder / "run"), rank, terminal)
    return terminal.getvalue()


@pytest.mark.parametrize(
    ("error", "rank", "line"),
    [
        (ValueError("a\nb"), 1, "error: rank 1 failed (ValueError: a b); its log is {folder}/run/logs/rank1.log\n"),
        (
            LOST,
            0,
            f"error: rank 0 lost another rank (RuntimeError: {LOST}); "
            "the logs of all ranks are in {folder}/run/logs\n",
        ),
    ],
)
def test_prints_one_line(
    error: Exception, rank: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert end(error, rank, tmp_path, monkeypatch) == line.format(folder=tmp_path)
    assert str(error) in log_file(tmp_path / "run", rank).read_text()
    assert reported(tmp_path) == f"{type(error).__name__}: {error}"


def reported(folder: Path) -> str:
    """Return the message that torchrun gets."""
    report: Any = json.loads((folder / "error.json").read_text())
    return report["message"]["message"]


@pytest.mark.parametrize("rank", [0, 1])
def test_user_error_is_printed_by_rank_zero_which_removes_the_run_folder(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log_file(tmp_path / "run", rank).parent.mkdir(parents=True)
    caplog.set_level(logging.INFO)
    printed = end(UserError("set x=1"), rank, tmp_path, monkeypatch)
    assert printed == ("" if rank else "error: set x=1\n")
    assert caplog.messages == (["error: set x=1"] if rank else [])  # rank zero would print it twice
    assert reported(tmp_path) == "UserError: set x=1"
    assert (tmp_path / "run").exists() == (rank > 0)


def test_user_error_above_rank_zero_waits_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torchrun may end rank zero before it prints."""
    polls = iter([0, 0, 15])
    monkeypatch.setattr(signals, "requested", lambda: next(polls))
    end(UserError("set x=1"), 1, tmp_path, monkeypatch)
    assert not list(polls)


def test_prints_nothing_if_torchrun_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "requested", lambda: 15)
    assert end(LOST, 0, tmp_path, monkeypatch) == ""
