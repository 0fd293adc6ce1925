"""The accelerator and the devices of a run: what `auto` stands for on this machine."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from onecurve.errors import UserError


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
