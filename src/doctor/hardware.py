"""GPUs and CPU cores, against the configured number of devices."""

import os
import re
from collections import Counter
from pathlib import Path

import torch
from omegaconf import DictConfig

from src.run.devices import resolve_devices
from src.utils.errors import UserError

_DRIVER = Path("/proc/driver/nvidia/version")


def processes_per_host(cfg: DictConfig) -> int:
    """Return the configured number of devices per host, whether this machine has them or not."""
    devices = cfg.trainer.devices
    if devices in ("auto", -1):
        gpus = 0 if cfg.trainer.accelerator == "cpu" else torch.accelerator.device_count()
        return int(os.environ.get("LOCAL_WORLD_SIZE", gpus or 1))
    return devices if isinstance(devices, int) else len(devices)


def check_devices(cfg: DictConfig) -> str:
    """Check that torch can use the GPUs of this machine, and that there are as many as configured."""
    driver = _driver_version()
    if driver and cfg.trainer.accelerator != "cpu" and not torch.cuda.is_available():
        raise UserError(_unusable_gpus(driver))
    accelerator, devices = resolve_devices(cfg.trainer.accelerator, cfg.trainer.devices)
    count = devices if isinstance(devices, int) else len(devices)
    if accelerator == "cpu":
        return f"no GPU is used: {count} process{'es' * (count > 1)} on the CPU"
    available = torch.accelerator.device_count()
    if not torch.cuda.is_available():
        return f"{count} of {available} ({accelerator})"
    return f"{count} of {available}: {_gpu_names(available)}; torch for CUDA {torch.version.cuda}, driver {driver}"


def check_cores(cfg: DictConfig) -> str:
    """Check that each process of a GPU has a core; otherwise the GPUs wait for the CPU."""
    cores, processes = len(os.sched_getaffinity(0)), processes_per_host(cfg)
    if torch.cuda.is_available() and cfg.trainer.accelerator != "cpu" and cores < processes:
        raise UserError(
            f"{processes} processes share {cores} core{'s' * (cores > 1)}: ask the scheduler or the container "
            "for at least one core per GPU"
        )
    return f"{cores} of {os.cpu_count()} for this process"


def _driver_version() -> str | None:
    """Return the version of the NVIDIA driver, if there is one."""
    if not _DRIVER.exists():
        return None
    found = re.search(r"Kernel Module\D+([\d.]+)", _DRIVER.read_text())
    return found[1] if found else "of unknown version"


def _unusable_gpus(driver: str) -> str:
    if torch.version.cuda is None:
        return (
            f"this machine has an NVIDIA driver ({driver}), but torch {torch.__version__} is built without CUDA: "
            "install a build for CUDA (https://pytorch.org/get-started/locally)"
        )
    return (
        f"torch for CUDA {torch.version.cuda} cannot start with the NVIDIA driver {driver}: check `nvidia-smi` and "
        "CUDA_VISIBLE_DEVICES; if both are right, update the driver, or install torch for an older CUDA"
    )


def _gpu_names(count: int) -> str:
    """Return the model and the memory of the GPUs. This query does not allocate memory on them."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    models = Counter(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    return " and ".join(f"{number} x {name}" for name, number in models.items())
