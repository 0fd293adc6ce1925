"""The process from which the ranks of this host are forked: it imports once what all of them need, in seconds.

It imports while its launcher goes on, and lasts for all restarts and all jobs of a sweep. CUDA allows this because it
asks for no device (https://docs.pytorch.org/docs/2.13/notes/multiprocessing.html#cuda-in-multiprocessing).
"""

import multiprocessing
import sys

START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"  # others import in each rank
PRELOADED = ["onecurve.run.experiment", "torch._dynamo"]


def start_fork_server() -> None:
    """Start it, unless it runs already."""
    if START_METHOD == "forkserver":
        from multiprocessing import forkserver

        multiprocessing.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
