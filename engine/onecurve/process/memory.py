"""The memory of a rank: how malloc reuses large blocks, and the peak."""

import ctypes
import resource
import sys

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # the constants of glibc's malloc.h
_RSS_BYTES = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss


def tune_malloc() -> bool:
    """Let glibc's malloc reuse large blocks; return whether it accepted both options.

    By default it maps each large block anew, and the kernel fills its pages with zeros. For the activations of a
    network this takes a fifth of each step or more. The price is fragmentation: up to a fifth more memory was measured.
    """
    return _mallopt(_MMAP_MAX, 0) and _mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def map_large_blocks() -> bool:
    """Let glibc's malloc map blocks of 32 MiB and more again; return whether it accepted both options.

    FSDP gathers and frees weights of many sizes, which leaves holes in memory that is kept: a process of two with
    180 MiB of weights grew from 1.2 to 2.8 GiB in sixty steps.
    """
    return _mallopt(_MMAP_THRESHOLD, 2**25) and _mallopt(_MMAP_MAX, 2**16)


def _mallopt(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    return mallopt is not None and bool(mallopt(option, value))


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak of the allocated tensors on a GPU, or of the resident set size on a CPU, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_BYTES / 2**20
