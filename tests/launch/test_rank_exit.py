"""A rank that torchrun or SLURM started ends with one line, also if other ranks wait for it."""

import io
import json
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
    log_file(folder, rank).parent.mkdir()
    terminal = io.StringIO()
    with pytest.raises(SystemExit, match="1"):
        rank_exit.exit_started_rank(error, str(folder), rank, terminal)
    return terminal.getvalue()


@pytest.mark.parametrize(
    ("error", "rank", "line"),
    [
        (ValueError("a\nb"), 1, "error: rank 1 failed (ValueError: a b); its log is {folder}/logs/rank1.log\n"),
        (UserError("set x=1"), 0, "error: set x=1\n"),
        (UserError("set x=1"), 1, ""),  # rank zero prints it
        (
            LOST,
            0,
            f"error: rank 0 lost another rank (RuntimeError: {LOST}); the logs of all ranks are in {{folder}}/logs\n",
        ),
    ],
)
def test_prints_one_line(
    error: Exception, rank: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert end(error, rank, tmp_path, monkeypatch) == line.format(folder=tmp_path)
    assert str(error) in log_file(tmp_path, rank).read_text()
    report: Any = json.loads((tmp_path / "error.json").read_text())
    assert report["message"]["message"] == f"{type(error).__name__}: {error}"


def test_prints_nothing_if_torchrun_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "requested", lambda: 15)
    assert end(LOST, 0, tmp_path, monkeypatch) == ""
