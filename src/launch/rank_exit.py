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
from typing import NoReturn, TextIO

from src.utils import signals
from src.utils.errors import UserError
from src.utils.rank_log import log_file

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# A collective raises an error with one of these words if a peer has exited.
_PEER_LOST = re.compile("gloo|nccl|connection|socket|peer|timed out", re.IGNORECASE)
_REPORT_DELAY = 10.0  # seconds, enough for the launcher to see which rank failed first


def exit_worker(error: Exception) -> NoReturn:
    """End a worker of this project's launcher, which has recorded its error."""
    logging.shutdown()
    _delay_secondary_failure(error)
    os._exit(1)


def exit_started_rank(error: Exception, run_dir: str, rank: int, terminal: TextIO) -> NoReturn:
    """End a rank that torchrun or SLURM started, with one line on the terminal for the error that came first.

    The traceback is in the rank's log. torchrun also prints that of the rank that failed first.
    """
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    # The report must exist before the sockets close, because their end fails the other ranks.
    if ERROR_FILE in os.environ:
        get_error_handler().record_exception(error)
    logging.shutdown()
    with log_file(run_dir, rank).open("a") as log:
        traceback.print_exception(error, file=log)
    _delay_secondary_failure(error)
    if not signals.requested() and (line := _error_line(error, run_dir, rank)):
        print(f"error: {line}", file=terminal, flush=True)
    os._exit(1)


def _error_line(error: Exception, run_dir: str, rank: int) -> str:
    """Return the message of a rank's error, or nothing for a user error above rank zero, as all ranks raise those."""
    if isinstance(error, UserError):
        return "" if rank else str(error)
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    if _has_lost_peer(error):
        return (
            f"rank {rank} lost another rank ({reason}); the logs of all ranks are in {log_file(run_dir, rank).parent}"
        )
    return f"rank {rank} failed ({reason}); its log is {log_file(run_dir, rank)}"


def _has_lost_peer(error: Exception) -> bool:
    """Return whether this rank failed only because a peer has exited."""
    return not isinstance(error, UserError) and bool(_PEER_LOST.search(f"{type(error).__name__} {error}"))


def _delay_secondary_failure(error: Exception) -> None:
    """If this rank failed only because a peer exited, wait until the launcher ends it, as that peer failed first."""
    deadline = time.monotonic() + _REPORT_DELAY
    while _has_lost_peer(error) and not signals.requested() and time.monotonic() < deadline:
        time.sleep(0.05)
