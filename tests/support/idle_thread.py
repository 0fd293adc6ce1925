"""A job of a new process, in a file that imports little."""

import atexit
from concurrent.futures import ThreadPoolExecutor

from onecurve.process.fork_server import register_end_of_interpreter


def leave_an_idle_thread() -> None:
    """End the process as a rank while a pool has an idle thread."""
    register_end_of_interpreter()
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    atexit.register(pool.shutdown)  # so that the pool lives as long as the process
