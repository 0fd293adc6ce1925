"""Private names of CPython."""

import atexit
import threading
from typing import Any


def end_threads_and_call_exit_functions() -> None:
    """Do what an interpreter does at its end, and a forked process does not.

    Pools of threads are told to end before they are waited for, and then `atexit` has its turn.
    (https://github.com/python/cpython/issues/83856; Python/pylifecycle.c, `wait_for_thread_shutdown`)
    """
    threads: Any = threading
    threads._shutdown()
    functions: Any = atexit
    functions._run_exitfuncs()
