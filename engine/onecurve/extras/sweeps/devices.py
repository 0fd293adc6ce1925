"""Devices of concurrent jobs of a sweep: each job gets GPUs or CPU cores that no other job uses."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

import torch
from filelock import Timeout
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from onecurve.process.devices import device_count, usable_cores
from onecurve.process.started_by import variables_replaced
from onecurve.records.files import named_lock

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PAUSE = 0.2  # seconds between two attempts to get a lock


def reserve_devices(cfg: DictConfig) -> AbstractContextManager[None]:
    """Wait until enough GPUs or cores are free, and let the processes started meanwhile see only those.

    With a launcher that runs one job after the other, each job has all devices.
    """
    if HydraConfig.get().launcher._target_.endswith("BasicLauncher"):
        return nullcontext()
    if cfg.trainer.accelerator == "cpu":
        return _reserve_cores(device_count(cfg.trainer))
    return _reserve_gpus(cfg.trainer.devices)


@contextmanager
def _reserve_cores(count: int) -> Iterator[None]:
    """Reserve one core for each process, or all cores if there are fewer."""
    before = usable_cores()
    with _acquire_locks([f"core {core}" for core in before], min(count, len(before))) as locks:
        if sys.platform != "linux":  # macOS cannot restrict a process to some cores
            yield
            return
        os.sched_setaffinity(0, [int(name.split()[1]) for name in locks])
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


@contextmanager
def _reserve_gpus(devices: int | list[int]) -> Iterator[None]:
    """Reserve a number of GPUs, or the listed ones, by the numbers that they have without CUDA_VISIBLE_DEVICES."""
    before = os.environ.get(_VISIBLE)
    visible = before.split(",") if before else [str(index) for index in range(torch.accelerator.device_count())]
    listed = range(len(visible)) if isinstance(devices, int) else devices
    count = devices if isinstance(devices, int) else len(devices)
    with _acquire_locks([f"gpu {visible[index]}" for index in listed], count) as locks:
        numbers = ",".join(name.split()[1] for name in locks)
        own = {_VISIBLE: numbers} if isinstance(devices, int) else {}  # listed indices refer to the variable as it is
        with variables_replaced(own, **own):
            yield


@contextmanager
def _acquire_locks(names: list[str], count: int) -> Iterator[list[str]]:
    """Wait until `count` of the named locks are free, hold them, and yield their names.

    Only one process at a time acquires locks, which prevents a deadlock.
    """
    acquired: list[str] = []
    with ExitStack() as stack:
        with named_lock("gathering"):
            while len(acquired) < count:
                for name in names:
                    if name not in acquired and len(acquired) < count:
                        with suppress(Timeout):  # another process holds it
                            stack.enter_context(named_lock(name).acquire(blocking=False))
                            acquired.append(name)
                if len(acquired) < count:
                    time.sleep(_PAUSE)
        yield sorted(acquired, key=names.index)
