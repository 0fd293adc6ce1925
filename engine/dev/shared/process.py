"""Programs that run in processes of their own, with a time limit."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[3]
TIMED_OUT = None  # the exit code of a command that was ended at its limit
_GRACE = 40.0  # seconds from SIGTERM to SIGKILL; torchrun kills a stopped worker after 30
_PAUSE = 0.05  # seconds between two looks at a process


def python(*arguments: object, processes: int = 1) -> list[str]:
    """Return the command that starts Python with these arguments, under torchrun if it takes several processes."""
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*launcher, *map(str, arguments)]


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that `run_limited` ends its command, which is in a session of its own."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def run_limited(command: list[str], log: Path, limit: float = math.inf) -> int | None:
    """Run a command in the repository root with its output in `log`, and end its process group.

    Returns:
        Its exit code, or TIMED_OUT if it did not end within `limit` seconds.
    """
    environment = {"WANDB_MODE": "offline"} | dict(os.environ)
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        is_in_time = _ends_within(process.pid, limit)
        if not is_in_time:
            _signal_group(process.pid, signal.SIGTERM)
            _ends_within(process.pid, _GRACE)
    finally:
        _signal_group(process.pid, signal.SIGKILL)
        code = process.wait()
    return code if is_in_time else TIMED_OUT


def _ends_within(process: int, seconds: float) -> bool:
    """Wait until a process has ended; a handler that raises in `Popen.wait` would leave its lock locked."""
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE)
    return True


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # no process of the group is left
        os.killpg(group, number)


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty; it usually names the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
