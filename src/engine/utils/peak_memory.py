"""The peak memory of this process."""

import resource
import sys

import torch

_RSS_BYTES = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak of the allocated tensors on a GPU, or of the resident set size on a CPU, in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_BYTES / 2**20
