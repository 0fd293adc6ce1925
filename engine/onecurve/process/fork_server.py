"""The process from which the ranks of this host are forked: it imports once what all of them need, in seconds.

It imports while its launcher goes on, and lasts for all restarts and all jobs of a sweep. CUDA allows this because it
asks for no device (https://docs.pytorch.org/docs/2.13/notes/multiprocessing.html#cuda-in-multiprocessing).
"""

import gc
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path

from onecurve.patches.python import end_threads_and_call_exit_functions
from onecurve.process.signals import SIGNALS
from onecurve.process.started_by import variables_replaced

PRELOADED = ["onecurve.run.experiment", "torch._dynamo"]
_LONGEST = 85  # characters of the folder of its socket, whose path has at most 107 on Linux, 18 for its name
_WRITTEN = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
_is_started = False


def start_fork_server() -> str:
    """Start it, unless it runs already; return the method by which `multiprocessing` starts ranks.

    That is `spawn` without a fork server: on other systems than Linux, if the path of the folder for temporary files is
    too long for a socket, or if a cleaner has emptied that folder.

    The server outlives a signal to all processes of a job, after which its ranks save; they accept signals again.
    """
    global _is_started
    if sys.platform != "linux":
        return "spawn"
    from multiprocessing import forkserver, resource_tracker

    sockets = Path(util.get_temp_dir())
    sockets.mkdir(parents=True, exist_ok=True)  # or its removal at the end of this process would fail
    if len(str(sockets)) > _LONGEST or (_is_started and not any(sockets.glob("listener-*"))):
        return "spawn"
    resource_tracker.ensure_running()  # or it would be started below, and unblock the signals
    multiprocessing.set_forkserver_preload(PRELOADED)
    with _inherited():
        forkserver.ensure_running()
    _is_started = True
    return "forkserver"


@contextmanager
def _inherited() -> Iterator[None]:
    """Let a new process block signals, and import from where this one does.

    It would find a module in the working directory before a library of that name, as `python -c` does, and so it begins
    in another. Some versions of CPython do not tell it the path (`main` of multiprocessing/forkserver.py).
    """
    folder, path = os.getcwd(), os.pathsep.join(map(os.path.abspath, sys.path))
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    os.chdir("/")
    try:
        with variables_replaced(["PYTHONPATH"], PYTHONPATH=path):
            yield
    finally:
        os.chdir(folder)
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def register_end_of_interpreter() -> None:
    """Let this process, at its end, wait for its threads, call what `atexit` has, and write its open files.

    One that was forked ends by `os._exit`, which does none of it.
    """
    util.Finalize(None, _end, exitpriority=-100)  # after the finalizers of multiprocessing


def _end() -> None:
    end_threads_and_call_exit_functions()
    for file in [one for one in gc.get_objects() if issubclass(type(one), _WRITTEN)]:
        with suppress(Exception):  # such as one that is closed
            file.flush()
