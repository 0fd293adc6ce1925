"""Limits of the operating system on shared memory, locked memory and open files."""

import resource
import shutil
from pathlib import Path

import torch
from omegaconf import DictConfig

from src.doctor.hardware import processes_per_host
from src.utils.errors import UserError

_SHARED_MEMORY = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")
_MIN_SHARED_MEMORY = 512 << 20  # bytes; Docker's default is 64 MiB
_MIN_OPEN_FILES = 1024
_CONNECTIONS = 4  # open files of rank zero for each rank


def check_shared_memory(cfg: DictConfig) -> str:
    """Check the size of /dev/shm, through which NCCL and the workers of a DataLoader pass data."""
    free = shutil.disk_usage(_SHARED_MEMORY).free
    is_used = cfg.data.num_workers > 0 or (torch.cuda.is_available() and processes_per_host(cfg) > 1)
    if is_used and free < _MIN_SHARED_MEMORY:
        raise UserError(
            f"{_SHARED_MEMORY} has {free >> 20} MiB free, which is too little for NCCL and for data.num_workers: "
            "start the container with --ipc=host or --shm-size=1g"
        )
    return f"{free / 2**30:.1f} GiB free"


def check_locked_memory(cfg: DictConfig) -> str:
    """Check the limit on locked memory, which InfiniBand needs: NCCL cannot register its buffers otherwise."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 20} MiB"
    if not (_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())):
        return f"{shown}; only InfiniBand needs it, which this machine does not have"
    if cfg.trainer.num_nodes > 1 and limit != resource.RLIM_INFINITY:
        raise UserError(
            f"`ulimit -l` is {shown}, but InfiniBand needs unlimited: set memlock in /etc/security/limits.conf, "
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf, or --ulimit memlock=-1 of the container"
        )
    return shown


def check_open_files(cfg: DictConfig) -> str:
    """Check the limit on open files: rank zero holds connections to all ranks."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(_MIN_OPEN_FILES, _CONNECTIONS * processes_per_host(cfg) * cfg.trainer.num_nodes)
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UserError(f"`ulimit -n` is {limit}, but this run may need {needed}: run `ulimit -n {needed}` before it")
    return f"at most {limit}"
