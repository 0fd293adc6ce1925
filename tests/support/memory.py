"""The memory of processes that run many tests: unlike one that trains, they give it back after each."""

import ctypes
import gc
import sys

import src.run.experiment


def disable_malloc_tuning() -> None:
    """Let no run of this process keep memory: that is for good, and one large model would have it for all others.

    What is imported by now stays out of each later collection, which would take a quarter of a second otherwise.
    """
    src.run.experiment.tune_malloc = lambda: False
    gc.freeze()


def release_memory() -> None:
    """Return free memory to the kernel."""
    gc.collect()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)
