"""Memory of processes that run many tests and release it after each, unlike a training process."""

import ctypes
import gc
import sys

import onecurve.run.trainer


def disable_malloc_tuning() -> None:
    """Disable malloc tuning, which is permanent: one large model would keep its memory in all later tests."""
    onecurve.run.trainer.tune_malloc = lambda: False
    gc.freeze()


def release_memory() -> None:
    """Return free memory to the kernel.

    What is left is excluded from later collections. It is mostly code: by the end of a session there is so much that a
    collection would take a quarter of a second.
    """
    gc.collect()
    gc.freeze()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)
