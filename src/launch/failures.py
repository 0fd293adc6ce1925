"""Find the rank that failed first, and its error."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from src.utils.errors import UserError
from src.utils.rank_log import batches_file, log_file

_PREFIX = f"{UserError.__name__}: "
# The innermost call of a rank that waits for other ranks is in one of these folders.
_WAITING_CODE = ("/torch/distributed/", "/torch/autograd/", "/torch/nn/parallel/")


class RankFailedError(RuntimeError):
    """A rank failed for a reason other than a user error.

    The message has its rank, its error and the path of its log.
    """


class RankDiedError(RankFailedError):
    """A rank ended without an error of its own: a signal killed its process, or a library exited."""


class ErrorReport(NamedTuple):
    """The error that a rank recorded before it exited; reports sort by time."""

    mtime_ns: int
    rank: int
    message: str
    trace: str


def log_sizes(run_dir: str) -> dict[int, int]:
    """Return the size of each rank's log in bytes; a later start appends to it."""
    logs = (Path(run_dir) / "logs").glob("rank*.log")
    return {int(log.stem.removeprefix("rank")): log.stat().st_size for log in logs}


def first_error(failed: Any, run_dir: str, sizes: dict[int, int]) -> Exception:
    """Return the exception to raise for the rank that failed first.

    The first user error comes before a hang, and a hang before any other error.

    Args:
        failed: elastic's ChildFailedError.
        run_dir: the run folder.
        sizes: size of each rank's log before this start.
    """
    rank, failure = failed.get_first_failure()  # a rank that only lost a peer delays its exit
    died = RankDiedError(f"rank {rank} died ({failure.message}); its log is {log_file(run_dir, rank)}")
    if failure.exitcode < 0:  # killed by a signal
        return died
    reports = _read_reports(Path(failure.error_file).parent.parent, first_rank=rank - failure.local_rank)
    for report in reports:
        if _PREFIX in report.message:  # Lightning's spawn launcher puts a worker's traceback before it
            return UserError(report.message.rpartition(_PREFIX)[2].strip())
    if stacks := _stacks(run_dir, sizes):
        return RankFailedError(_hang_message(stacks, {report.rank for report in reports}, run_dir))
    if not reports:
        return died
    first = reports[0]
    log = log_file(run_dir, first.rank)
    return RankFailedError(f"rank {first.rank} failed ({first.message}); its log is {log}\n{first.trace}")


def _read_reports(folder: Path, first_rank: int) -> list[ErrorReport]:
    """Return the error reports of this host's ranks, the earliest first.

    Args:
        folder: elastic's folder of errors, with a folder for each local rank.
        first_rank: the rank whose local rank is 0.
    """
    reports = []
    for file in folder.glob("*/error.json"):
        error = json.loads(file.read_text())["message"]
        rank = first_rank + int(file.parent.name)
        trace = error["extraInfo"]["py_callstack"]
        reports.append(ErrorReport(file.stat().st_mtime_ns, rank, error["message"], trace))
    return sorted(reports)


def _stacks(run_dir: str, sizes: dict[int, int]) -> dict[int, list[str]]:
    """Return each rank's stack as its watchdog wrote it; nothing if no watchdog has."""
    stacks = {}
    for rank, size in log_sizes(run_dir).items():
        start = sizes.get(rank, 0)
        if size > start:  # the other logs belong to ranks of an earlier start
            stacks[rank] = _main_thread_stack(log_file(run_dir, rank), start)
    return stacks if any(stacks.values()) else {}


def _main_thread_stack(log: Path, start: int) -> list[str]:
    """Return the main thread's stack, innermost call first, from faulthandler's dump after position `start`."""
    with log.open(errors="replace") as stream:
        stream.seek(start)
        _, _, dump = stream.read().partition("Timeout (")
    main_thread = dump.rpartition("Thread 0x")[2]  # faulthandler writes the main thread last
    lines = [line.strip() for line in main_thread.splitlines()[1:]]
    return [line for line in lines if line.startswith("File ")]


def _hang_message(stacks: dict[int, list[str]], raised: set[int], run_dir: str) -> str:
    """Return a message that names the ranks that hang, without the ranks that only waited for them.

    Args:
        stacks: stack of each rank, empty if its watchdog wrote none.
        raised: ranks that reported an error; such a rank hung only if its watchdog wrote a stack.
        run_dir: the run folder.
    """
    candidates = {rank: stack for rank, stack in stacks.items() if stack or rank not in raised}
    hung = [rank for rank, stack in candidates.items() if not _is_waiting(stack)]
    batches = {rank: _batches(run_dir, rank) for rank in stacks}
    messages = []
    for rank in _behind(hung or list(candidates), batches):
        stack = "\n    ".join(candidates[rank])
        stack = stack or "no stack was written: the process was stopped, or is stuck in the kernel"
        place = f"rank {rank} hangs at batch {batches[rank]} of {max(batches.values())}"
        messages.append(f"{place}; its log is {log_file(run_dir, rank)}\n    {stack}")
    return "no step within launch.timeout; " + "\n".join(messages)


def _behind(ranks: list[int], batches: dict[int, int]) -> list[int]:
    """Return those of the ranks that have begun the fewest batches.

    Stacks do not tell on a GPU, where a rank waits for the others in any call that waits for the device.
    """
    fewest = min(batches[rank] for rank in ranks)
    return [rank for rank in ranks if batches[rank] == fewest]


def _batches(run_dir: str, rank: int) -> int:
    """Return the number of batches that a rank had begun, as its watchdog wrote it; 0 if it has none."""
    try:
        return int(batches_file(run_dir, rank).read_text())
    except (FileNotFoundError, ValueError):
        return 0


def _is_waiting(stack: list[str]) -> bool:
    """Return whether the innermost call waits for other ranks."""
    return bool(stack) and any(code in stack[0] for code in _WAITING_CODE)
