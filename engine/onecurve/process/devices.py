"""The devices of a run on this host, and the CPU cores of its ranks."""

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from onecurve.errors import UserError
from onecurve.process.started_by import started_by


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
