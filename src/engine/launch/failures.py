"""The failure of a run: each rank reports its error before it exits, and the launcher raises the one that came first.

A rank that loses another one fails as well. It therefore waits for some seconds before it exits: the launcher first
sees the exit of a rank that died without a report, and ends the others.
"""

import logging
import os
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn, TextIO

from src.engine.config.folder import remove_if_unused
from src.engine.launch.tracebacks import append_traceback, fold_frames
from src.engine.utils.errors import UserError
from src.engine.utils.files import read_json_lines
from src.engine.utils.rank_log import log_file

REPORT_FILE = "TORCHELASTIC_ERROR_FILE"  # environment variable with the path of a rank's report
_PREFIX = f"{UserError.__name__}: "
_EXIT_DELAY = 3.0  # seconds; torchrun and this launcher look at the ranks ten times a second
_log = logging.getLogger(__name__)


class RankFailedError(RuntimeError):
    """A rank failed for a reason other than a user error.

    The message has its rank, its error and the path of its log.
    """


class RankDiedError(RankFailedError):
    """A rank ended without an error of its own: a signal killed its process, or a library exited."""


def exit_worker(error: Exception) -> NoReturn:
    """Report the error, and end this worker of the project's launcher, whose process group is open.

    The interpreter's own exit would wait for the other ranks, which wait for this one in a collective: Lightning
    destroys an NCCL group in an exit handler (`_init_dist_connection` in lightning/fabric/utilities/distributed.py).
    With gloo the exit may abort.
    """
    _report(error)
    if not isinstance(error, UserError):  # which never comes from the loss of another rank
        time.sleep(_EXIT_DELAY)
    logging.shutdown()
    os._exit(1)


def exit_started_rank(error: Exception, run_dir: str, rank: int, terminal: TextIO) -> NoReturn:
    """End a rank that torchrun or SLURM started, as `exit_worker` does, with one line on the terminal.

    All ranks raise a user error, and rank zero prints it. The traceback of another error is in the rank's log.
    """
    _report(error)
    if isinstance(error, UserError):
        if rank == 0:
            print(f"error: {error}", file=terminal, flush=True)
        else:  # not as a warning: with doctor=true, ranks have no log, and warnings would be on the terminal
            _log.info("error: %s", error)
            time.sleep(_EXIT_DELAY)  # torchrun ends all ranks when one exits, so rank zero prints first
        logging.shutdown()
        remove_if_unused(Path(run_dir))
    else:
        append_traceback(error, run_dir, rank)
        time.sleep(_EXIT_DELAY)  # torchrun ends this rank meanwhile if another one has died
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"error: rank {rank} failed ({reason}); its log is {log_file(run_dir, rank)}", file=terminal, flush=True)
    os._exit(1)


def short_traceback(error: Exception, run_dir: str) -> str:
    """Return what the terminal shows of a lost rank or an error in the user's code; nothing for a bug of the template.

    The log of the rank that failed has the whole traceback.
    """
    is_of_ranks = isinstance(error, RankFailedError)  # the message has the rank's traceback and log
    trace = f"error: {error}" if is_of_ranks else "".join(traceback.format_exception(error))
    short = fold_frames(trace)
    if short == trace and '  File "' in trace:
        return ""
    if not is_of_ranks:
        append_traceback(error, run_dir, rank=0)
        short += f"full traceback: {log_file(run_dir, 0)}"
    return short.rstrip()


def _report(error: Exception) -> None:
    """Write the report of this rank. It must exist before the sockets close, because their end fails other ranks."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if REPORT_FILE in os.environ:
        get_error_handler().record_exception(error)


def first_failure(failed: Any, run_dir: str) -> Exception:
    """Return the exception to raise for the rank that failed first.

    Args:
        failed: elastic's ChildFailedError, which has the rank that ended first.
        run_dir: the run folder.
    """
    rank, failure = failed.get_first_failure()
    died = RankDiedError(f"rank {rank} died ({failure.message}); its log is {log_file(run_dir, rank)}")
    if failure.exitcode < 0:  # killed by a signal
        return died
    if hang := _describe_hang(run_dir):
        return RankFailedError(hang)
    files = Path(failure.error_file).parent.parent.glob("*/error.json")
    earliest_first = sorted(files, key=lambda file: file.stat().st_mtime_ns)
    # A rank that was killed while it wrote its report leaves a part of it, which is no JSON.
    reports = {int(file.parent.name): line["message"] for file in earliest_first for line in read_json_lines(file)}
    for error in reports.values():
        if _PREFIX in error["message"]:  # Lightning's spawn launcher puts a worker's traceback before it
            return UserError(error["message"].rpartition(_PREFIX)[2].strip())
    if not reports:
        return died
    rank, error = next(iter(reports.items()))
    trace = error["extraInfo"]["py_callstack"]
    return RankFailedError(f"rank {rank} failed ({error['message']}); its log is {log_file(run_dir, rank)}\n{trace}")


def remove_stacks(run_dir: str) -> None:
    """Move the stacks that the ranks of an earlier start have left to the ends of their logs."""
    for rank, file in _stack_files(run_dir).items():
        with log_file(run_dir, rank).open("a") as log:
            log.write(file.read_text())
        file.unlink()


def _describe_hang(run_dir: str) -> str:
    """Return a line with the files of the stacks, or nothing if the timer of no rank has run out."""
    files = sorted(_stack_files(run_dir).items())
    written = [file.name for _, file in files if file.stat().st_size]
    if not written:
        return ""
    silent = "".join(f"; rank {rank} wrote none" for rank, file in files if file.name not in written)
    reason = " (the process was stopped, or is stuck in the kernel)" if silent else ""
    return f"no step within launch.timeout; stacks are in {run_dir}/logs: {', '.join(written)}{silent}{reason}"


def _stack_files(run_dir: str) -> dict[int, Path]:
    files = (Path(run_dir) / "logs").glob("rank*.stack")
    return {int(file.stem.removeprefix("rank")): file for file in files}
