"""Which rank failed first, and what it has to say of it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from src.utils.errors import UserError
from src.utils.rank_log import log_file

_PREFIX = f"{UserError.__name__}: "
_WAITS_IN = (
    "/torch/distributed/",
    "/torch/autograd/",
    "/torch/nn/parallel/",
)  # where a rank stands that waits for the others


class RankFailed(RuntimeError):
    """A rank failed by no fault that its user can mend: its number, its error, and where its log is."""


class Report(NamedTuple):
    """What a rank that raised left behind."""

    when: int
    rank: int
    message: str
    trace: str


def log_sizes(run_dir: str) -> dict[int, int]:
    """How long the log of each rank is, before the ranks of another start append to it."""
    logs = (Path(run_dir) / "logs").glob("rank*.log")
    return {int(log.stem.removeprefix("rank")): log.stat().st_size for log in logs}


def first_error(failed: Any, run_dir: str, sizes: dict[int, int]) -> Exception:
    """The error of the rank that failed first, as the exception to raise.

    Args:
        failed: elastic's ChildFailedError.
        run_dir: the run folder.
        sizes: of the logs before these ranks wrote to them.
    """
    rank, failure = failed.get_first_failure()  # those that only lost it wait before they end
    if failure.exitcode < 0:
        return RankFailed(f"rank {rank} died ({failure.message}); its log is {log_file(run_dir, rank)}")
    reports = sorted(_report(file) for file in Path(failure.error_file).parent.parent.glob("*/error.json"))
    for report in reports:
        if _PREFIX in report.message:  # also at the end of what a process of Lightning's spawning raised
            return UserError(report.message.rpartition(_PREFIX)[2].strip())
    if stacks := _stacks(run_dir, sizes):
        raised = {report.rank + rank - failure.local_rank for report in reports}  # since it lost one that hung
        hung = {number: stack for number, stack in stacks.items() if stack or number not in raised}
        return RankFailed(_hang(hung, run_dir))
    if not reports:
        return RankFailed(f"rank {rank} died ({failure.message}); its log is {log_file(run_dir, rank)}")
    first = reports[0]
    return RankFailed(
        f"rank {first.rank} failed ({first.message}); its log is {log_file(run_dir, first.rank)}\n{first.trace}"
    )


def _report(file: Path) -> Report:
    report = json.loads(file.read_text())["message"]
    return Report(
        file.stat().st_mtime_ns, int(file.parent.name), report["message"], report["extraInfo"]["py_callstack"]
    )


def _stacks(run_dir: str, sizes: dict[int, int]) -> dict[int, list[str]]:
    """Of each rank the calls in which its main thread stood when it had waited too long, innermost first."""
    stacks = {}
    written = [rank for rank, size in log_sizes(run_dir).items() if size > sizes.get(rank, 0)]
    for rank in written:  # others are of ranks that an earlier start had
        with log_file(run_dir, rank).open(errors="replace") as log:
            log.seek(sizes.get(rank, 0))
            _, found, dump = log.read().partition("Timeout (")
        lines = [line.strip() for line in dump.rpartition("Thread 0x")[2].splitlines()[1:]]  # the main one comes last
        stacks[rank] = [line for line in lines if line.startswith("File ")] if found else []
    return stacks if any(stacks.values()) else {}


def _hang(stacks: dict[int, list[str]], run_dir: str) -> str:
    """Name the ranks that did not wait for others; all, where none can be told from the rest."""
    hung = [rank for rank, stack in stacks.items() if not stack or not any(place in stack[0] for place in _WAITS_IN)]
    messages = []
    for rank in hung or stacks:
        stack = "\n    ".join(stacks[rank]) or "its stack could not be had: it was stopped, or is stuck in the kernel"
        messages.append(f"rank {rank} hangs; its log is {log_file(run_dir, rank)}\n    {stack}")
    return "no step within launch.timeout; " + "\n".join(messages)
