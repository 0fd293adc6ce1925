"""Find the rank that failed first, and its error."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from src.utils.errors import UserError
from src.utils.rank_log import log_file

_PREFIX = f"{UserError.__name__}: "
_WAITING_CODE = (
    "/torch/distributed/",
    "/torch/autograd/",
    "/torch/nn/parallel/",
)  # where a rank stands that waits for the others


class RankFailedError(RuntimeError):
    """A rank failed for a reason other than a user error.

    The message has its rank, its error and the path of its log.
    """


class ErrorReport(NamedTuple):
    """The error that a rank recorded before it exited; its rank is the one on its host."""

    mtime_ns: int
    local_rank: int
    message: str
    trace: str


def log_sizes(run_dir: str) -> dict[int, int]:
    """How long the log of each rank is, before the ranks of another start append to it."""
    logs = (Path(run_dir) / "logs").glob("rank*.log")
    return {int(log.stem.removeprefix("rank")): log.stat().st_size for log in logs}


def first_error(failed: Any, run_dir: str, sizes: dict[int, int]) -> Exception:
    """Return the error of the rank that failed first, as the exception to raise.

    Args:
        failed: elastic's ChildFailedError.
        run_dir: the run folder.
        sizes: size of each rank's log before this start.
    """
    rank, failure = failed.get_first_failure()  # ranks that only lost a peer wait before they exit
    if failure.exitcode < 0:
        return RankFailedError(f"rank {rank} died ({failure.message}); its log is {log_file(run_dir, rank)}")
    offset = rank - failure.local_rank  # of this host's ranks
    reports = sorted(_report(file) for file in Path(failure.error_file).parent.parent.glob("*/error.json"))
    for report in reports:
        if _PREFIX in report.message:  # Lightning's spawn launcher puts a worker's traceback before it
            return UserError(report.message.rpartition(_PREFIX)[2].strip())
    if stacks := _stacks(run_dir, sizes):
        raised = {report.local_rank + offset for report in reports}  # a rank that raised did not hang
        hung = {number: stack for number, stack in stacks.items() if stack or number not in raised}
        return RankFailedError(_hang_message(hung, run_dir))
    if not reports:
        return RankFailedError(f"rank {rank} died ({failure.message}); its log is {log_file(run_dir, rank)}")
    first = reports[0]
    first_rank = first.local_rank + offset
    return RankFailedError(
        f"rank {first_rank} failed ({first.message}); its log is {log_file(run_dir, first_rank)}\n{first.trace}"
    )


def _report(file: Path) -> ErrorReport:
    report = json.loads(file.read_text())["message"]
    return ErrorReport(
        file.stat().st_mtime_ns, int(file.parent.name), report["message"], report["extraInfo"]["py_callstack"]
    )


def _stacks(run_dir: str, sizes: dict[int, int]) -> dict[int, list[str]]:
    """Return each rank's main-thread stack, innermost call first, as its watchdog wrote it to the rank's log."""
    stacks = {}
    written = [rank for rank, size in log_sizes(run_dir).items() if size > sizes.get(rank, 0)]
    for rank in written:  # the other logs belong to ranks of an earlier start
        with log_file(run_dir, rank).open(errors="replace") as log:
            log.seek(sizes.get(rank, 0))
            _, found, dump = log.read().partition("Timeout (")
        lines = [line.strip() for line in dump.rpartition("Thread 0x")[2].splitlines()[1:]]  # the main one comes last
        stacks[rank] = [line for line in lines if line.startswith("File ")] if found else []
    return stacks if any(stacks.values()) else {}


def _hang_message(stacks: dict[int, list[str]], run_dir: str) -> str:
    """Return a message that names the ranks that were not waiting for others, or all ranks if every one was waiting."""
    hung = [rank for rank, stack in stacks.items() if not stack or not any(code in stack[0] for code in _WAITING_CODE)]
    messages = []
    for rank in hung or stacks:
        stack = (
            "\n    ".join(stacks[rank]) or "no stack was written: the process was stopped, or is stuck in the kernel"
        )
        messages.append(f"rank {rank} hangs; its log is {log_file(run_dir, rank)}\n    {stack}")
    return "no step within launch.timeout; " + "\n".join(messages)
