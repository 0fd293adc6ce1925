"""The hardware that a plan is for: figures of conf/hardware, or what is measured on this machine."""

import json
import os
import socket
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from src.engine.plan import read_cache, update_cache

_FILE = "machine.json"
_SIZES = (1 << 12, 1 << 22, 1 << 25)  # bytes of the tensors whose two all-reduces and copy are timed
_REPEATS = 20
_EFFICIENCY = 0.5  # fraction of its peak that a device reaches in large operations; assumed
_LAUNCH = 5e-6  # seconds of a device's shortest operation; assumed
_PRECISIONS = {"64": "fp64", "bf": "bf16", "16": "bf16"}


class Hardware:
    """Nodes of one kind, with the figures of a file in conf/hardware, whose comments have their units.

    Args:
        tflops: by `fp64`, `fp32`, `tf32` (convolutions in float32) and `bf16`; None if the network is timed instead.
        overlaps: whether devices compute while they communicate. CPUs do both with the same cores.
    """

    def __init__(
        self,
        devices_per_node: int,
        memory_gib: float,
        within: dict[str, float],
        between: dict[str, float],
        memory_gb_per_s: float,
        tflops: dict[str, float] | None = None,
        price_per_hour: float | None = None,
        overlaps: bool = True,
    ) -> None:
        self.devices_per_node, self.memory, self.price_per_hour = devices_per_node, memory_gib * 2**30, price_per_hour
        self.within, self.between, self.overlaps = within, between, overlaps
        self.tflops, self.memory_rate = tflops, memory_gb_per_s * 1e9

    def message_seconds(self, is_within_node: bool, nbytes: float, messages: float) -> float:
        """Return the seconds of some messages between two devices, which have `nbytes` bytes together."""
        link = self.within if is_within_node else self.between
        return messages * link["us"] * 1e-6 + nbytes / (link["gb_per_s"] * 1e9)

    def operation_seconds(self, flops: float, nbytes: float, is_convolution: bool, precision: str) -> float:
        """Return the seconds of an operation by the roofline model (Williams, Waterman and Patterson, 2009)."""
        assert self.tflops
        rate = self.tflops[_PRECISIONS.get(precision[:2], "tf32" if is_convolution else "fp32")] * 1e12 * _EFFICIENCY
        return max(flops / rate, nbytes / self.memory_rate, _LAUNCH)


def this_machine(price_per_hour: float | None = None) -> Hardware:
    """Return the hardware of this machine, which is measured once for each version of torch."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = f"{socket.gethostname()}, {gpus} GPUs, {os.cpu_count()} cores, torch {torch.__version__}"
    measured = read_cache(_FILE).get(name)
    if not measured:
        measured = _measure(gpus)
        update_cache(_FILE, {name: measured})
    if gpus:
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    devices = gpus or len(os.sched_getaffinity(0))
    return Hardware(devices, memory / 2**30, price_per_hour=price_per_hour, overlaps=gpus > 0, **measured)


def _measure(gpus: int) -> dict[str, Any]:
    """Return the figures of the link between two GPUs, or two processes on the CPU, and of their memory."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_measure_as_rank, (folder, gpus > 1), nprocs=2, start_method="spawn")
        small, large, copy = json.loads(Path(folder, "seconds.json").read_text())
    # Each of the two ranks sends two messages, with half of the tensor.
    per_byte = max(large - small, 1e-9) / (_SIZES[1] - _SIZES[0])
    link = {"gb_per_s": 1e-9 / per_byte, "us": max(0.0, small - _SIZES[0] * per_byte) / 2 * 1e6}
    return {"within": link, "between": link, "memory_gb_per_s": 2 * _SIZES[2] / copy / 1e9}


def _measure_as_rank(rank: int, folder: str, uses_gpus: bool) -> None:
    """Write the median seconds of two all-reduces and a copy, which both ranks make at the same time."""
    from torch.utils.benchmark import Timer  # late, because each run checks the options of this file's classes

    device = torch.device("cuda", rank) if uses_gpus else torch.device("cpu")
    if uses_gpus:
        torch.cuda.set_device(rank)  # the timer waits for this one
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("nccl" if uses_gpus else "gloo", store=store, rank=rank, world_size=2)
    small, large, copied = (torch.zeros(size // 4, device=device) for size in _SIZES)
    seconds = []
    copy = partial(copied.copy_, copied.clone())
    for operation in (partial(dist.all_reduce, small), partial(dist.all_reduce, large), copy):
        timer = Timer("operation()", globals={"operation": operation})
        seconds.append(statistics.median(timer.timeit(1).mean for _ in range(_REPEATS)))
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()
