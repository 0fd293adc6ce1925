"""Let glibc keep freed memory instead of returning it to the kernel (CPU training)."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # the constants of glibc's malloc.h


def tune_malloc() -> bool:
    """Let glibc's malloc reuse large blocks; return whether it accepted both options.

    By default it maps each large block anew, and the kernel fills its pages with zeros. For the activations of a
    network this takes a fifth of each step or more. The price is fragmentation: up to a fifth more memory was measured.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and bool(mallopt(_MMAP_MAX, 0) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))
