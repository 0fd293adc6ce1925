"""Devices of concurrent jobs of a sweep: each job gets GPUs or CPU cores that no other job uses."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from src.engine.config.devices import device_count
from src.engine.utils.locks import acquire_locks

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@contextmanager
def reserve_devices(cfg: DictConfig) -> Iterator[None]:
    """Wait until enough GPUs or cores are free, and let the processes started meanwhile see only those.

    With a launcher that runs one job after the other, each job has all devices.
    """
    if HydraConfig.get().launcher._target_.endswith("BasicLauncher"):
        yield
    elif cfg.trainer.accelerator == "cpu":
        with _reserve_cores(device_count(cfg.trainer)):
            yield
    else:
        with _reserve_gpus(cfg.trainer.devices):
            yield


@contextmanager
def _reserve_cores(count: int) -> Iterator[None]:
    """Reserve one core for each process, or all cores if there are fewer."""
    before = sorted(os.sched_getaffinity(0))
    with acquire_locks([f"core {core}" for core in before], min(count, len(before))) as locks:
        os.sched_setaffinity(0, [int(name.split()[1]) for name in locks])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


@contextmanager
def _reserve_gpus(devices: int | list[int]) -> Iterator[None]:
    """Reserve a number of GPUs, or the listed ones.

    The locks use the numbers that the GPUs have without CUDA_VISIBLE_DEVICES.
    """
    before = os.environ.get(_VISIBLE)
    visible = before.split(",") if before else [str(index) for index in range(torch.accelerator.device_count())]
    if not isinstance(devices, int):
        # CUDA_VISIBLE_DEVICES stays as it is, because the listed indices refer to it.
        with acquire_locks([f"gpu {visible[index]}" for index in devices], len(devices)):
            yield
        return
    with acquire_locks([f"gpu {gpu}" for gpu in visible], devices) as locks:
        os.environ[_VISIBLE] = ",".join(name.split()[1] for name in locks)
        try:
            yield
        finally:
            os.environ.pop(_VISIBLE)
            if before is not None:
                os.environ[_VISIBLE] = before
