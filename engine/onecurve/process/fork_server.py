"""The process from which the ranks of this host are forked: it imports once what all of them need, in seconds.

It imports while its launcher goes on, and lasts for all restarts and all jobs of a sweep. CUDA allows this because it
asks for no device (https://docs.pytorch.org/docs/2.13/notes/multiprocessing.html#cuda-in-multiprocessing).
"""

import multiprocessing
import os
import signal
import sys

from onecurve.process.signals import SIGNALS

START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"  # others import in each rank
PRELOADED = ["onecurve.run.experiment", "torch._dynamo"]


def start_fork_server() -> None:
    """Start it, unless it runs already.

    It outlives a signal to all processes of a job, after which its ranks save; they accept signals again. It would find
    a module in the working directory before a library of that name, as `python -c` does, and so it begins in another.
    """
    if START_METHOD == "forkserver":
        from multiprocessing import forkserver, resource_tracker

        resource_tracker.ensure_running()  # or it would be started below, and unblock the signals
        multiprocessing.set_forkserver_preload(PRELOADED)
        folder, unblocked = os.getcwd(), signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        os.chdir("/")
        try:
            forkserver.ensure_running()
        finally:
            os.chdir(folder)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
