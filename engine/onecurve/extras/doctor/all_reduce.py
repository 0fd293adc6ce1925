"""The job of each rank with doctor=true: an all-reduce on its device, with a time limit for every step."""

import faulthandler
import multiprocessing
import socket
import time
from datetime import timedelta
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor

from onecurve.errors import UserError
from onecurve.launch.external import connect_ranks, missing_ranks
from onecurve.process.groups import close_process_group
from onecurve.process.started_by import detect_cluster_environment
from onecurve.run.result import Result

_TIMEOUT = 60.0  # seconds for the ranks to get ready, and as many for their communication
_SIZE = 16 << 20  # float32 numbers, 64 MiB
_REPEATS = 5


def measure_all_reduce(cfg: DictConfig) -> Result:
    """Reduce a tensor over all ranks; as metrics, return the `processes`, `hosts` and `bytes`, and mean `seconds`."""
    # The last resort, as this thread may hang in a call of the driver. Descriptor 2 is stderr, also in a notebook.
    faulthandler.dump_traceback_later(3 * _TIMEOUT, exit=True, file=2)
    env = detect_cluster_environment()
    rank, world_size, local_rank = (env.global_rank(), env.world_size(), env.local_rank()) if env else (0, 1, 0)
    store = dist.PrefixStore("doctor", connect_ranks(env)) if env else dist.HashStore()
    device = torch.device("cpu")
    if cfg.trainer.accelerator != "cpu" and torch.cuda.is_available():
        devices = cfg.trainer.devices
        device = torch.device("cuda", local_rank if isinstance(devices, int) else devices[local_rank])
    values = torch.ones(_SIZE, device=device)
    try:
        hosts = _names_of_hosts(store, rank, world_size)
        with ThreadPool(1) as pool:  # a call of NCCL that hangs cannot be interrupted
            seconds = pool.apply_async(_time_all_reduce, (values, store, rank, world_size)).get(_TIMEOUT)
    except multiprocessing.TimeoutError:
        raise UserError(
            f"the ranks on {', '.join(hosts)} are ready, but their all-reduce does not end in {_TIMEOUT:.0f} s: set "
            "NCCL_SOCKET_IFNAME (for CPUs GLOO_SOCKET_IFNAME) to the network interface that connects the hosts; on one "
            "host, try NCCL_P2P_DISABLE=1; NCCL_DEBUG=INFO shows where it hangs"
        ) from None
    finally:
        faulthandler.cancel_dump_traceback_later()
    close_process_group()
    measured = {"processes": world_size, "hosts": len(hosts), "bytes": values.nbytes, "seconds": seconds}
    return Result(measured, Path(cfg.run_dir))


def _names_of_hosts(store: dist.Store, rank: int, world_size: int) -> list[str]:
    """Wait until every rank has a tensor on its device; return the names of the hosts, or raise a UserError."""
    store.set(f"ready/{rank}", socket.gethostname())
    if missing := missing_ranks(store, "ready", world_size, timedelta(seconds=_TIMEOUT)):
        ranks = ", ".join(map(str, missing))
        raise UserError(f"no answer after {_TIMEOUT:.0f} s from rank {ranks}: see `nvidia-smi` and `dmesg` on its host")
    return sorted({store.get(f"ready/{other}").decode() for other in range(world_size)})


def _time_all_reduce(values: Tensor, store: dist.Store, rank: int, world_size: int) -> float:
    """Return the mean seconds of an all-reduce; `values` are ones on the device of this rank."""
    if values.is_cuda:
        torch.cuda.set_device(values.device)  # which is a setting of the thread
    backend, limit = "nccl" if values.is_cuda else "gloo", timedelta(seconds=2 * _TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    dist.all_reduce(values)  # the first one also connects the ranks
    if not torch.all(values == world_size):
        raise UserError(f"the sum of {world_size} ones is {values.mean():g}: test the memory and the links of the GPUs")
    begun = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(values)
    if values.is_cuda:
        torch.cuda.synchronize(values.device)
    return (time.perf_counter() - begun) / _REPEATS
