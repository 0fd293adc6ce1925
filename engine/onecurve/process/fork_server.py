"""The process from which the ranks of this host are forked: it imports once what all of them need, in seconds.

It imports while its launcher goes on, and lasts for all restarts and all jobs of a sweep. CUDA allows this because it
asks for no device (https://docs.pytorch.org/docs/2.13/notes/multiprocessing.html#cuda-in-multiprocessing).
"""

import multiprocessing
import signal
import sys

from onecurve.process.signals import SIGNALS

START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"  # others import in each rank
PRELOADED = ["onecurve.run.experiment", "torch._dynamo"]


def start_fork_server() -> None:
    """Start it, unless it runs already."""
    if START_METHOD == "forkserver":
        from multiprocessing import forkserver, resource_tracker

        resource_tracker.ensure_running()  # or it would be started below, and unblock the signals
        multiprocessing.set_forkserver_preload(PRELOADED)
        # It must outlive a signal to all processes of a job, after which its ranks save; they accept signals again.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
