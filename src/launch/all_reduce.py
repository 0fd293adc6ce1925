"""The job of a rank with doctor=true: a real all-reduce on its device, with a time limit for every step."""

import faulthandler
import os
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from src.launch.external import detect_cluster_environment
from src.utils.errors import UserError
from src.utils.process_group import close_process_group

_TIMEOUT = 60.0  # seconds for the ranks to arrive, and as many for their communication
_SIZE = 16 << 20  # float32 numbers, 64 MiB
_DURATION = 1.0  # seconds of repetitions
_CLOCK_ROUNDS = 5
_ADVICE = {
    "gloo": "set GLOO_SOCKET_IFNAME to the network interface that connects the hosts",
    "nccl": (
        "NCCL_DEBUG=INFO shows where; between hosts, set NCCL_SOCKET_IFNAME to the interface that connects them; "
        "on one host, try NCCL_P2P_DISABLE=1"
    ),
}


def measure_all_reduce(cfg: DictConfig) -> dict[str, float]:
    """Reduce a tensor over all ranks; return `processes`, `seconds`, `bytes` and `clock_difference`, in seconds.

    `seconds` is the median of rank zero, or 0 with one process.

    Raises:
        UserError: if a rank does not arrive, the communication hangs, the result is wrong, or versions differ.
    """
    # The main thread may hang as well. Descriptor 2 is stderr, whatever a notebook has made of `sys.stderr`.
    faulthandler.dump_traceback_later(3 * _TIMEOUT, exit=True, file=2)
    try:
        rank, world_size, local_rank, store = _connect()
        values = torch.ones(_SIZE, device=_device(cfg, local_rank))
        _wait_for_ranks(store, rank, world_size)
        measured = _run_in_time(lambda: _measure(values, store, rank, world_size), _backend(values), world_size)
        close_process_group()
    finally:
        faulthandler.cancel_dump_traceback_later()
    return measured


def _connect() -> tuple[int, int, int, dist.Store]:
    """Return rank, world size, local rank, and a store that all ranks share."""
    env = detect_cluster_environment()
    if env is None:
        return 0, 1, 0, dist.HashStore()
    rank, world_size = env.global_rank(), env.world_size()
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=_TIMEOUT)
    store = dist.TCPStore(env.main_address, env.main_port, world_size, is_server, limit, wait_for_workers=False)
    return rank, world_size, env.local_rank(), dist.PrefixStore("doctor", store)


def _device(cfg: DictConfig, local_rank: int) -> torch.device:
    if cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    devices = cfg.trainer.devices
    return torch.device("cuda", local_rank if isinstance(devices, int) else devices[local_rank])


def _backend(values: Tensor) -> str:
    return "nccl" if values.is_cuda else "gloo"


def _wait_for_ranks(store: dist.Store, rank: int, world_size: int) -> None:
    """Wait until all ranks have a tensor on their device.

    Raises:
        UserError: if some have not in time; the message names them.
    """
    store.set(f"arrived/{rank}", "")
    names = [f"arrived/{other}" for other in range(world_size)]
    deadline = time.monotonic() + _TIMEOUT
    while not store.check(names):
        if time.monotonic() > deadline:
            missing = ", ".join(str(other) for other, name in enumerate(names) if not store.check([name]))
            raise UserError(
                f"rank {missing} has no tensor on its device after {_TIMEOUT:.0f} s: see `nvidia-smi` and `dmesg` there"
            )
        time.sleep(0.02)


def _run_in_time(work: Callable[[], dict[str, float]], backend: str, world_size: int) -> dict[str, float]:
    """Return the result of `work`, which runs in a thread, because a call of NCCL that hangs cannot be interrupted.

    Raises:
        UserError: if it does not end in time.
    """
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_TIMEOUT)
    if not result:
        raise UserError(
            f"the all-reduce of {world_size} processes by {backend} has not ended after {_TIMEOUT:.0f} s: "
            f"{_ADVICE[backend]}"
        )
    if isinstance(result[0], Exception):
        raise result[0]
    return result[0]


def _measure(values: Tensor, store: dist.Store, rank: int, world_size: int) -> dict[str, float]:
    """Open the process group and measure; `values` are ones on the device of this rank."""
    if values.is_cuda:
        torch.cuda.set_device(values.device)  # which is a setting of the thread
    limit = timedelta(seconds=2 * _TIMEOUT)
    dist.init_process_group(_backend(values), store=store, rank=rank, world_size=world_size, timeout=limit)
    first = _time_all_reduce(values)
    if not torch.all(values == world_size):
        raise UserError(f"the sum of {world_size} ones is {values.mean():g}: test the memory and the links of the GPUs")
    _check_versions()
    result = {"processes": world_size, "bytes": values.nbytes, "clock_difference": _clock_difference()}
    if world_size == 1:
        return result | {"seconds": 0.0}
    slowest = torch.tensor(first, device=values.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks need the same number of repetitions
    repeats = max(1, min(10, int(_DURATION / slowest.item())))
    return result | {"seconds": statistics.median(_time_all_reduce(values) for _ in range(repeats))}


def _time_all_reduce(values: Tensor) -> float:
    """Return the seconds of one all-reduce, after a barrier."""
    dist.barrier()
    begun = time.perf_counter()
    dist.all_reduce(values)
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
    return time.perf_counter() - begun


def _check_versions() -> None:
    """Check that all processes have the same versions of torch and NCCL.

    Raises:
        UserError: if not.
    """
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    versions = _gather((torch.__version__, nccl))
    for rank, other in enumerate(versions):
        if other != versions[0]:
            raise UserError(
                f"rank {rank} has torch {other[0]} and NCCL {other[1]}, but rank 0 has {versions[0][0]} and "
                f"{versions[0][1]}: install the same versions on all hosts"
            )


def _clock_difference() -> float:
    """Return the largest difference between the clocks of the processes, in seconds.

    It is the least of several rounds, because a busy host may delay a process after the barrier.
    """
    differences = []
    for _ in range(_CLOCK_ROUNDS):
        dist.barrier()
        clocks = _gather(time.time())
        differences.append(max(clocks) - min(clocks))
    return min(differences)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
