"""The hardware that a plan is for: figures of conf/hardware, or what is measured on this machine."""

import json
import os
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from src.engine.utils.files import atomic_write

_CACHE = Path(__file__).parents[3] / "runs" / "hardware.json"
_SIZES = (1 << 12, 1 << 22)  # bytes of the all-reduces that are timed
_REPEATS = 20
_EFFICIENCY = 0.5  # fraction of its peak that a device reaches in large operations; assumed
_LAUNCH = 5e-6  # seconds of a device's shortest operation; assumed
_PRECISIONS = {"64": "fp64", "bf": "bf16", "16": "bf16"}


@dataclass(frozen=True)
class Link:
    """A link between two devices: a message takes `us` microseconds, and its bytes go at `gb_per_s`."""

    gb_per_s: float
    us: float

    def seconds(self, nbytes: float, messages: float) -> float:
        """Return the seconds of some messages, which have `nbytes` bytes together."""
        return messages * self.us * 1e-6 + nbytes / (self.gb_per_s * 1e9)


class Hardware:
    """Nodes of one kind.

    Args:
        devices_per_node: number of devices of a node.
        memory_gib: memory of one device; on CPUs that of a node.
        within: `gb_per_s` and `us` of the link between two devices of a node, in one direction.
        between: the same between two nodes, for each device.
        tflops: peak of one device without sparsity, by `fp64`, `fp32`, `tf32` (convolutions in float32) and `bf16`;
            None if the network is timed instead.
        memory_gb_per_s: bandwidth of one device's memory.
        price_per_hour: of one device, in any currency.
        overlaps: whether devices compute while they communicate. CPUs do both with the same cores.
    """

    def __init__(
        self,
        devices_per_node: int,
        memory_gib: float,
        within: dict[str, float],
        between: dict[str, float],
        tflops: dict[str, float] | None = None,
        memory_gb_per_s: float = 1.0,
        price_per_hour: float | None = None,
        overlaps: bool = True,
    ) -> None:
        self.devices_per_node, self.memory, self.price_per_hour = devices_per_node, memory_gib * 2**30, price_per_hour
        self.within, self.between, self.overlaps = Link(**within), Link(**between), overlaps
        self.tflops, self.memory_rate = tflops, memory_gb_per_s * 1e9

    def operation_seconds(self, flops: float, nbytes: float, is_convolution: bool, precision: str) -> float:
        """Return the seconds of an operation by the roofline model (Williams, Waterman and Patterson, 2009)."""
        assert self.tflops
        rate = self.tflops[_PRECISIONS.get(precision[:2], "tf32" if is_convolution else "fp32")] * 1e12 * _EFFICIENCY
        return max(flops / rate, nbytes / self.memory_rate, _LAUNCH)


def this_machine(price_per_hour: float | None = None) -> Hardware:
    """Return the hardware of this machine, whose links are measured once for each version of torch."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = f"{socket.gethostname()}, {gpus} GPUs, {os.cpu_count()} cores, torch {torch.__version__}"
    cache = json.loads(_CACHE.read_text()) if _CACHE.exists() else {}
    if name not in cache:
        cache[name] = _measure_link(gpus)
        _CACHE.parent.mkdir(exist_ok=True)
        with atomic_write(_CACHE) as file:
            file.write_text(json.dumps(cache, indent=2))
    devices = gpus or len(os.sched_getaffinity(0))
    if gpus:
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    link = cache[name]
    return Hardware(devices, memory / 2**30, link, link, price_per_hour=price_per_hour, overlaps=gpus > 0)


def _measure_link(gpus: int) -> dict[str, float]:
    """Return `gb_per_s` and `us` of the link between two GPUs, or two processes on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_measure_as_rank, (folder, gpus > 1), nprocs=2, start_method="spawn")
        small, large = json.loads(Path(folder, "seconds.json").read_text())
    # Each of the two ranks sends two messages, with half of the tensor.
    per_byte = max(large - small, 1e-9) / (_SIZES[1] - _SIZES[0])
    return {"gb_per_s": 1e-9 / per_byte, "us": max(0.0, small - _SIZES[0] * per_byte) / 2 * 1e6}


def _measure_as_rank(rank: int, folder: str, uses_gpus: bool) -> None:
    device = torch.device("cuda", rank) if uses_gpus else torch.device("cpu")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("nccl" if uses_gpus else "gloo", store=store, rank=rank, world_size=2)
    seconds = []
    for size in _SIZES:
        values, times = torch.zeros(size // 4, device=device), []
        for _ in range(_REPEATS):
            begun = time.perf_counter()
            dist.all_reduce(values)
            if uses_gpus:
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - begun)
        seconds.append(statistics.median(times))
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.destroy_process_group()
