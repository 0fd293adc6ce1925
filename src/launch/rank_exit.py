"""End a rank that has failed while a process group is open, by `os._exit`.

The interpreter's own exit would wait for the other ranks, which wait for this one in a collective: Lightning destroys
an NCCL group in an exit handler (`_init_dist_connection` in lightning/fabric/utilities/distributed.py). With gloo the
exit may abort.
"""

import logging
import os
import re
import time
import traceback
from pathlib import Path
from typing import NoReturn, TextIO

from src.run.folder import remove_if_unused
from src.utils import signals
from src.utils.errors import UserError
from src.utils.rank_log import log_file, open_log

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# A collective raises an error with one of these words if a peer has exited.
_PEER_LOST = re.compile("gloo|nccl|connection|socket|peer|timed out", re.IGNORECASE)
_REPORT_DELAY = 10.0  # seconds, enough for the launcher to see which rank failed first
_log = logging.getLogger(__name__)


def exit_worker(error: Exception) -> NoReturn:
    """End a worker of this project's launcher, which has recorded its error."""
    logging.shutdown()
    _delay_secondary_failure(error)
    os._exit(1)


def exit_started_rank(error: Exception, run_dir: str, rank: int, terminal: TextIO) -> NoReturn:
    """End a rank that torchrun or SLURM started, with one line on the terminal for the error that came first.

    The traceback of any error but a user error is in the rank's log. torchrun also prints that of the rank that failed
    first.
    """
    if isinstance(error, UserError):
        _report_user_error(error, run_dir, rank, terminal)
    else:
        _report_failure(error, run_dir, rank, terminal)
    os._exit(1)


def _report_user_error(error: UserError, run_dir: str, rank: int, terminal: TextIO) -> None:
    """Print the message on rank zero only, because all ranks raise it, and remove an unused run folder.

    torchrun ends all ranks when one exits. Rank zero therefore prints first, and the others wait for their end.
    """
    if rank == 0:
        print(f"error: {error}", file=terminal, flush=True)
    else:  # not as a warning: with doctor=true, ranks have no log, and warnings would be on the terminal
        _log.info("error: %s", error)
    _record(error)
    if rank:
        _wait_for_launcher()
    remove_if_unused(Path(run_dir))  # last, as it removes the logs


def _report_failure(error: Exception, run_dir: str, rank: int, terminal: TextIO) -> None:
    """Write the traceback to the rank's log, and print one line, unless the launcher ends this rank first."""
    _record(error)
    log = log_file(run_dir, rank)
    with os.fdopen(open_log(log), "a") as file:
        traceback.print_exception(error, file=file)
    _delay_secondary_failure(error)
    if signals.requested():
        return
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    if _has_lost_peer(error):
        line = f"rank {rank} lost another rank ({reason}); the logs of all ranks are in {log.parent}"
    else:
        line = f"rank {rank} failed ({reason}); its log is {log}"
    print(f"error: {line}", file=terminal, flush=True)


def _record(error: Exception) -> None:
    """Write torchrun's report, which must exist before the sockets close, because their end fails the other ranks."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if ERROR_FILE in os.environ:
        get_error_handler().record_exception(error)
    logging.shutdown()


def _has_lost_peer(error: Exception) -> bool:
    """Return whether this rank failed only because a peer has exited."""
    return not isinstance(error, UserError) and bool(_PEER_LOST.search(f"{type(error).__name__} {error}"))


def _delay_secondary_failure(error: Exception) -> None:
    """If this rank failed only because a peer exited, wait until the launcher ends it, as that peer failed first."""
    if _has_lost_peer(error):
        _wait_for_launcher()


def _wait_for_launcher() -> None:
    """Wait until the launcher ends this rank, or for `_REPORT_DELAY`."""
    deadline = time.monotonic() + _REPORT_DELAY
    while not signals.requested() and time.monotonic() < deadline:
        time.sleep(0.05)
