"""Let glibc keep freed memory instead of returning it to the kernel (CPU training)."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of malloc.h


def tune_malloc() -> bool:
    """Let glibc's malloc keep large blocks for the next ones; return whether there is one to be told.

    By default it maps each anew, and the kernel fills all its pages with zeros, which for a network's activations, in
    every step, takes a fifth of the time or more. The price is some fragmentation: seen was a fifth more memory.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
