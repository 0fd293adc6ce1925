"""The events of a run, such as its starts and its end: `events.jsonl` in the run folder, a JSON object per line."""

import csv
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGINT, Signals
from typing import Any

from onecurve.errors import RankFailedError, UserError
from onecurve.process.signals import RESIZE, Stopped
from onecurve.records.files import CHECKPOINTS, METRICS, append_json_line, is_of_test, read_json_lines

_log = logging.getLogger(__name__)
_FILE = "events.jsonl"
STARTS = ("start", "resume")
ENDS = {"finished": "good", "stopped": "warn", "failed": "bad", "killed": "bad"}  # and their colors on pages


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
        event: start, resume, stopped, failed, killed, restart or finished.
        step: optimizer steps that the run has taken.
        seconds: UNIX time of the event; None is now.
    """
    entry = {"time": seconds or time.time(), "event": event, "step": step, "reason": reason} | details
    try:
        append_json_line(Path(run_dir) / _FILE, entry)
    except OSError as error:  # such as a full disk: the run goes on, or ends with its own error
        _log.warning("%s lacks an event: %s", _FILE, error)


def read_events(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the events of a run in their order, without lines that a kill has cut; empty if there is no record."""
    return list(read_json_lines(Path(run_dir) / _FILE))


def last_of(events: Sequence[dict[str, Any]], *kinds: str) -> dict[str, Any]:
    """Return the last event of these kinds, which others may follow; empty if there is none."""
    return next((event for event in reversed(events) if event["event"] in kinds), {})


def append_end(run_dir: str | Path, event: str, reason: str | None, seconds: float | None = None) -> None:
    """Append the end of a run, unless its rank zero has recorded one, or it has not started."""
    if last_of(read_events(run_dir), *STARTS, *ENDS).get("event") in STARTS:
        append_event(run_dir, event, logged_steps(run_dir), reason, seconds)


def append_restart(run_dir: str | Path, end: BaseException, reason: str) -> None:
    """Append the end of the ranks, and that they start again; `reason` is why on other devices, if so."""
    event, cause = end_of(end)
    append_end(run_dir, event, cause)
    append_event(run_dir, "restart", logged_steps(run_dir), reason or cause)


def end_of(error: BaseException) -> tuple[str, str]:
    """Return the event and the reason of the end by which an error ends a run."""
    if isinstance(error, Stopped):
        return "stopped", "resized" if error.number == RESIZE else Signals(error.number).name
    if isinstance(error, KeyboardInterrupt):
        return "stopped", SIGINT.name
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, RankFailedError):  # stacks follow in further lines
        return "failed" if error.dead_rank is None else "killed", lines[0]
    # A user error may be the cause of a longer one, which ends with it.
    return "failed", lines[-1] if isinstance(error, UserError) else f"{type(error).__name__}: {lines[0]}"


@contextmanager
def failure_recorded(run_dir: str | Path) -> Iterator[None]:
    """Record that the process before was killed, if it has recorded no end, and how this one fails or stops.

    Success is left to rank zero, which records `finished` itself: it knows the step, which metrics.csv may not have.
    """
    files = [Path(run_dir) / name for name in (_FILE, METRICS)]
    last_written = max((file.stat().st_mtime for file in files if file.exists()), default=None)
    append_end(run_dir, "killed", "no end was recorded", last_written)
    try:
        yield
    except BaseException as error:
        append_end(run_dir, *end_of(error))
        raise


def logged_steps(run_dir: str | Path) -> int | None:
    """Return the number of optimizer steps up to the last complete row of metrics.csv, or None."""
    file = Path(run_dir) / METRICS
    lines = file.read_text().split("\n")[:-1] if file.exists() else []  # without one that a kill has cut
    # A test's row counts all steps. Other rows are known by any value, as plain modules name theirs.
    rows = [row for row in csv.DictReader(lines) if row["step"]]
    rows = [row for row in rows if any(row[key] for key in row if key not in ("step", "epoch") and not is_of_test(key))]
    return int(rows[-1]["step"]) + 1 if rows else None


def stop_message(number: int, run_dir: str | Path, place: str = "") -> str:
    """Return the line that says by which signal, and where, a run has stopped, and how to continue it."""
    stopped = f"stopped by {Signals(number).name}{place}"
    if any((Path(run_dir) / CHECKPOINTS).glob("*.ckpt")):
        return f"{stopped}; ckpt_path={run_dir} goes on from its last save"
    return f"{stopped}; {run_dir} has no checkpoint yet"
