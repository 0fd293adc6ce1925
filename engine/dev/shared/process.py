"""Programs that run in processes of their own, with a time limit."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    (code,) = run_together([Command(command, log)], limit)
    return code


class Command(NamedTuple):
    """A command, the file for its output, and variables that are added to its environment."""

    words: list[str]
    log: Path
    environment: dict[str, str] = {}  # noqa: RUF012  # never changed


def run_together(commands: Sequence[Command], limit: float = math.inf) -> list[int | None]:
    """Run commands in the repository root at the same time, and end their process groups.

    When one of them fails, the others are ended too.

    Returns:
        Their exit codes; TIMED_OUT for those that were ended, after `limit` seconds or because of another one.
    """
    processes: list[subprocess.Popen[bytes]] = []
    running: list[int] = []
    try:
        processes.extend(_start(command) for command in commands)
        running = _wait([process.pid for process in processes], limit)
        for number in running:
            _signal_group(number, signal.SIGTERM)
        _wait(running, _GRACE, ignore_failures=True)
    finally:
        for process in processes:
            _signal_group(process.pid, signal.SIGKILL)
        codes = [process.wait() for process in processes]
    return [TIMED_OUT if process.pid in running else code for process, code in zip(processes, codes, strict=True)]


def _start(command: Command) -> subprocess.Popen[bytes]:
    environment = {"WANDB_MODE": "offline"} | dict(os.environ) | command.environment
    with command.log.open("w") as stream:
        return subprocess.Popen(
            command.words, cwd=ROOT, env=environment, stdout=stream, stderr=stream, start_new_session=True
        )


def _wait(processes: list[int], seconds: float, ignore_failures: bool = False) -> list[int]:
    """Wait until the processes have ended or one has failed; return those that are running then.

    A handler that raises in `Popen.wait` would leave its lock locked, so this asks the kernel.
    """
    deadline, running = time.monotonic() + seconds, list(processes)
    while running and time.monotonic() < deadline:
        ended = {process: os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) for process in running}
        running = [process for process in running if ended[process] is None]
        if not ignore_failures and any(result and result.si_status for result in ended.values()):
            break
        if running:
            time.sleep(_PAUSE)
    return running


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # no process of the group is left
        os.killpg(group, number)


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty; it usually names the error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"
