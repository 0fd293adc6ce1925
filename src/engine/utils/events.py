"""The events of a run, such as its starts and its end: `events.jsonl` in the run folder, a JSON object per line."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from src.engine.utils.files import append_json_line, read_json_lines

_log = logging.getLogger(__name__)
_FILE = "events.jsonl"


@contextmanager
def _failure_is_a_warning() -> Iterator[None]:
    """Let the run continue, or end with its own error, if an event cannot be recorded, such as on a full disk."""
    try:
        yield
    except OSError as error:
        _log.warning("%s lacks an event: %s", _FILE, error)


@_failure_is_a_warning()
def append_event(
    run_dir: str | Path,
    event: str,
    step: int | None = None,
    reason: str | None = None,
    seconds: float | None = None,
    **details: Any,
) -> None:
    """Append an event to the record of a run; only one process of the run may do so at a time.

    Args:
        run_dir: the run folder.
        event: start, resume, stopped, failed, killed, restart or finished.
        step: optimizer steps that the run has taken.
        reason: one line.
        seconds: UNIX time of the event; None is now.
        details: values that JSON can represent.
    """
    entry = {"time": seconds or time.time(), "event": event, "step": step, "reason": reason} | details
    append_json_line(Path(run_dir) / _FILE, entry)


def read_events(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the events of a run by time; empty if there is no record."""
    return sorted(_read(run_dir), key=lambda entry: entry["time"])


@_failure_is_a_warning()
def append_kill(run_dir: str | Path) -> None:
    """Append that the last process of a run was killed, if it has recorded no end; a new process calls this first."""
    if _is_open(run_dir):
        append_event(run_dir, "killed", last_logged_step(run_dir), "no end was recorded", _last_sign_of_life(run_dir))


@_failure_is_a_warning()
def append_end(run_dir: str | Path, event: str, reason: str) -> None:
    """Append the end of a run, unless its rank zero has recorded one, or it has not started."""
    if _is_open(run_dir):
        append_event(run_dir, event, last_logged_step(run_dir), reason)


def last_logged_step(run_dir: str | Path) -> int | None:
    """Return the step of the last complete row of metrics.csv, or None."""
    file = Path(run_dir) / "metrics.csv"
    rows = file.read_text().split("\n")[1:-1] if file.exists() else []
    return int(rows[-1].partition(",")[0]) if rows else None


def _read(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the events in the order of the file, without lines that a kill has cut."""
    return list(read_json_lines(Path(run_dir) / _FILE))


def _is_open(run_dir: str | Path) -> bool:
    """Return whether a start is the newest event: the run is in progress, or its end was not recorded."""
    entries = _read(run_dir)
    return bool(entries) and entries[-1]["event"] in ("start", "resume")


def _last_sign_of_life(run_dir: str | Path) -> float:
    """Return the UNIX time at which a run without an end has last recorded something, between its start and now.

    The clock of a file server may differ from that of this host.
    """
    files = [Path(run_dir) / name for name in (_FILE, "metrics.csv")]
    newest = max(file.stat().st_mtime for file in files if file.exists())
    return min(max(newest, _read(run_dir)[-1]["time"]), time.time())
