"""A rank's process: who started it, its memory, and the timeouts and the end of its process groups."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # the constants of glibc's malloc.h
_RSS_BYTES = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
_PAUSE = 0.05  # seconds, so that gloo's threads can take the GIL
_MARGIN = timedelta(minutes=5)


def detect_cluster_environment() -> ClusterEnvironment | None:
    """Return the environment of torchrun or SLURM, or None if neither started this process as one of several ranks."""
    if not {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS"} & os.environ.keys():
        return None
    from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if SLURMEnvironment.detect() and int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        return SLURMEnvironment(auto_requeue=False)
    return None


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


def set_timeouts_after(seconds: float) -> None:
    """Let the collectives of all process groups fail some minutes after `launch.timeout` seconds.

    The timer of `src/engine/run/stopping.py` then ends the rank that hangs. NCCL would end one that waits for it: by
    default after half an hour, and after ten minutes in the subgroups of a device mesh, which take no timeout.
    """
    if dist.is_initialized():
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds) + _MARGIN, group)


def close_process_group() -> None:
    """Destroy the process group. A process that exits while its gloo group exists may abort.

    The pause avoids a deadlock in torch (docs/upstream/gloo_gil.md). A thread of gloo that still has to free a tensor
    waits for the GIL, and the destructor of the group holds the GIL while it waits for that thread.
    """
    if dist.is_initialized():
        time.sleep(_PAUSE)
        dist.destroy_process_group()
