"""What a run that has ended leaves: the error that is shown if ranks failed, the record of it, and the page.

A rank that loses another one fails as well. It therefore waits for some seconds before it exits: the launcher first
sees the exit of a rank that died without a report, and ends the others.
"""

import contextlib
import logging
import os
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from filelock import Timeout
from omegaconf import DictConfig

from onecurve.config.folder import PROJECT, remove_if_unused
from onecurve.errors import RankFailedError, UserError
from onecurve.process.layer_calls import first_different_calls
from onecurve.process.log import log_file, report_error
from onecurve.records.events import failure_recorded
from onecurve.records.files import METRICS, named_lock, read_json_lines

_EXIT_DELAY = 3.0  # seconds; torchrun and this launcher look at the ranks ten times a second
_TIMER = "Timeout ("  # what faulthandler writes before it ends a process
_LOCK_TIMEOUT = 5.0  # seconds in which the processes of a killed start end
_LIBRARIES = rf".*(?:site|dist)-packages/|{re.escape(sysconfig.get_path('stdlib'))}/|<"
_ENGINE = rf"(?:{re.escape(str(PROJECT))}/)?(?:(?:engine/)?onecurve/|train\.py)"
_FOLDED_FRAMES = re.compile(rf'(?:  File "(?:{_LIBRARIES}|{_ENGINE}).*\n(?:(?!  File ) .*\n)*)+')


def exit_rank(error: Exception, run_dir: str, rank: int, terminal: TextIO | None = None) -> NoReturn:
    """Report the error, and end this rank, whose process group may be open.

    If torchrun or SLURM started it, `terminal` gets one line; the project's own launcher prints one itself.

    The interpreter's own exit would wait for the other ranks, which wait for this one in a collective: Lightning
    destroys an NCCL group in an exit handler (`_init_dist_connection` in lightning/fabric/utilities/distributed.py).
    With gloo the exit may abort.
    """
    report_error(error)  # before the sockets close, because their end fails other ranks
    is_for_user = isinstance(error, UserError)
    if not is_for_user:
        append_traceback(error, run_dir, rank)
    if rank > 0 or not is_for_user:
        # torchrun ends this rank meanwhile, if another one has died or has printed the user error of all ranks.
        time.sleep(_EXIT_DELAY)
    if terminal and not is_for_user:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"error: rank {rank} failed ({reason}); its log is {log_file(run_dir, rank)}", file=terminal, flush=True)
    elif terminal and rank == 0:
        print(f"error: {error}", file=terminal, flush=True)
        remove_if_unused(Path(run_dir))
    logging.shutdown()
    os._exit(1)


def append_traceback(error: Exception, run_dir: str, rank: int) -> None:
    """Append the whole traceback to the log of a rank."""
    log = log_file(run_dir, rank)
    with contextlib.suppress(OSError):  # such as a full disk, which must not hide the error
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as file:
            traceback.print_exception(error, file=file)


def text_for_terminal(error: Exception, run_dir: str) -> str:
    """Return what the terminal shows of an error: one line for a user error, otherwise the user's frames.

    The log of the rank has the whole traceback.
    """
    if isinstance(error, UserError | RankFailedError):  # the second has the rank's traceback and log in its message
        return fold_frames(f"error: {error}").rstrip()
    append_traceback(error, run_dir, rank=0)
    log = log_file(run_dir, 0)
    return fold_frames("".join(traceback.format_exception(error))) + f"full traceback: {log}" * log.is_file()


def fold_frames(trace: str) -> str:
    """Return the text of tracebacks with one line for successive frames of libraries and of onecurve.

    A text without a frame of the user's files is returned as it is: the error is a bug of the template.
    """
    folded = _FOLDED_FRAMES.sub("  ... frames of libraries and of onecurve ...\n", trace)
    return folded if '\n  File "' in folded else trace


def first_failure(failed: Any, run_dir: str, reports: Path) -> Exception:
    """Return the exception to raise for the rank that failed first, by the folder of the ranks' reports.

    Elastic's ChildFailedError `failed` has the rank that ended first, which may be another one.
    """
    rank, failure = failed.get_first_failure()
    if calls := first_different_calls(reports):  # NCCL then waits or aborts, as gloo does
        return UserError(
            f"strategy=fsdp gathers a layer when every rank calls it: {calls}. Call the same layers for all samples, "
            "or take strategy=ddp with bit_exact=true or +strategy.find_unused_parameters=true"
        )
    # torch crashes with this value on CPUs.
    debug = "; unset TORCH_DISTRIBUTED_DEBUG=DETAIL" * (os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL")
    died = RankFailedError(f"rank {rank} died ({failure.message}){debug}; its log is {log_file(run_dir, rank)}", rank)
    if failure.exitcode < 0:  # killed by a signal
        return died
    logs = [file for file in Path(run_dir, "logs").glob("rank*.log") if _TIMER in file.read_text(errors="replace")]
    has_no_report = not Path(failure.error_file).is_file() or "ProcessExitedException" in str(failure.message)
    if failure.exitcode == 1 and has_no_report and logs:  # ended by the timer of `Watchdog`, perhaps in a spawned rank
        return RankFailedError(
            f"a rank took no step within launch.timeout: the logs in {run_dir}/logs have the stacks of the ranks that "
            "could write them"
        )
    return _first_report(reports, run_dir) or died


def _first_report(reports: Path, run_dir: str) -> Exception | None:
    """Return the error that a rank reported first, if any did."""
    for file in sorted(reports.rglob("error.json"), key=lambda file: file.stat().st_mtime_ns):
        for line in read_json_lines(file):  # none, if the rank was killed while it wrote them
            error, rank = line["message"], int(file.parent.name)
            # Lightning's spawn launcher puts a worker's traceback before its user error.
            _, is_for_user, message = error["message"].rpartition(f"{UserError.__name__}: ")
            if is_for_user:
                return UserError(message.strip())
            log, trace = log_file(run_dir, rank), error["extraInfo"]["py_callstack"]
            return RankFailedError(f"rank {rank} failed ({error['message']}); its log is {log}\n{trace}")
    return None


@contextlib.contextmanager
def run_lifecycle(cfg: DictConfig) -> Iterator[None]:
    """Let no other start of the run begin meanwhile; record if this one fails; then write the page of the run."""
    lock = named_lock(f"run {Path(cfg.run_dir).resolve()}")
    try:
        lock.acquire(timeout=_LOCK_TIMEOUT)
    except Timeout:
        raise UserError(
            f"run_dir={cfg.run_dir}: another start of this run is in progress on this machine: stop it, or choose "
            "another folder"
        ) from None
    try:
        with failure_recorded(cfg.run_dir):
            yield
    finally:
        if cfg.report and not cfg.doctor:
            write_report(Path(cfg.run_dir))
        lock.release()


def write_report(folder: Path) -> None:
    """Write the page of a sweep, or of a run that has logged anything; print one line if that is not possible."""
    try:
        # The imports are here, so that a template without engine/onecurve/extras/report trains as well.
        from onecurve.extras.jobs import is_sweep

        if is_sweep(folder) or (folder / METRICS).is_file():
            from onecurve.extras.report import write_page_of

            write_page_of(folder)
    except ModuleNotFoundError as error:
        print(f"no report.html: {error}; pip install '.[report]', or set report=false", file=sys.stderr)
    except Exception as error:  # a run must not fail, nor lose its own error, because of its report
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"warning: no report.html ({reason}); try python -m scripts.report {folder}", file=sys.stderr)
