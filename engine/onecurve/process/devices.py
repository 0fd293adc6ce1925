"""The hardware of a rank on this host: its devices, CPU cores and memory."""

import ctypes
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

import torch

from onecurve.errors import UserError
from onecurve.process.started_by import started_by

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # the constants of glibc's malloc.h
_RSS_BYTES = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss


def resolve_devices(accelerator: str, devices: Any) -> tuple[str, int | list[int]]:
    """Return the accelerator without `auto`, and the number of devices per node or the listed GPU indices."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator == "auto":
        accelerator = found.type if found else "cpu"
    if accelerator != "cpu" and found is None:
        raise UserError(f"trainer.accelerator={accelerator}, but this machine has none: set auto or cpu")
    num_gpus = 0 if accelerator == "cpu" else torch.accelerator.device_count()
    if devices in ("auto", -1):
        # torchrun has already started LOCAL_WORLD_SIZE processes.
        return accelerator, int(os.environ.get("LOCAL_WORLD_SIZE", num_gpus or 1))
    indices = list(devices) if isinstance(devices, Sequence) and not isinstance(devices, str) else []
    count = devices if isinstance(devices, int) else len(indices)
    if count < 1:
        raise UserError(f"trainer.devices={devices} is no number of devices: give a number, a list of GPUs, or auto")
    if len(set(indices)) < len(indices):
        raise UserError(f"trainer.devices={devices} lists a device twice: list each one once")
    if accelerator == "cpu":
        return accelerator, count
    if max(count, max(indices, default=0) + 1) > num_gpus:
        raise UserError(
            f"trainer.devices={devices}, but this machine has {num_gpus} GPU{'s' * (num_gpus > 1)}: "
            f"set trainer.devices={num_gpus}, or trainer.accelerator=cpu to run processes on the CPU"
        )
    return accelerator, indices or count


def check_num_nodes(nodes: Any) -> None:
    if not isinstance(nodes, int) or nodes < 1:
        raise UserError(f"trainer.num_nodes={nodes}: give the number of hosts, at least one")


def device_count(trainer: Any) -> int:
    """Return the number of devices per node of a resolved trainer configuration."""
    return trainer.devices if isinstance(trainer.devices, int) else len(trainer.devices)


def cores_per_rank(ranks: int) -> int:
    """Return the CPU cores for each of the ranks of this node; torch would use all of them in each process.

    GPU ranks need them as well, for data that is read or transformed on the host. A rank that SLURM started has cores
    of its own.
    """
    if "SLURM_CPUS_PER_TASK" in os.environ and started_by() != "torchrun":
        return int(os.environ["SLURM_CPUS_PER_TASK"])
    return len(usable_cores()) // ranks


def usable_cores() -> list[int]:
    """Return the numbers of the CPU cores that this process may use; on macOS all, because it does not tell."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))


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
