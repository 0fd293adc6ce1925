"""The hardware that a plan is for: figures of conf/hardware, or what is measured on this machine."""

import gc
import json
import os
import socket
import statistics
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes

from onecurve.config.folder import PROJECT
from onecurve.network.precision import dtype_name
from onecurve.process.devices import usable_cores
from onecurve.process.groups import close_process_group
from onecurve.records.files import atomic_write

_FILE = "machine.json"  # in the folder runs/
_FIGURES = {"within", "between", "memory_gb_per_s", "sharding_us"}  # those that are measured
_WIDTHS = (32, 1024)  # of square weights in float32, small and large, whose communication is timed
_LAYERS = 4
_COPIED = 1 << 25  # bytes of the tensor whose copy is timed
_REPEATS = 20
_EFFICIENCY = 0.5  # fraction of its peak that a device reaches in large operations; assumed
_LAUNCH = 5e-6  # seconds of a device's shortest operation; assumed
_RATES = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "bf16"}


@dataclass
class Hardware:
    """Nodes of one kind, with the figures of a file in conf/hardware, whose comments have their units.

    Attributes:
        tflops: by `fp64`, `fp32`, `tf32` (convolutions in float32) and `bf16`; None if the network is timed instead.
        overlaps: whether devices compute while they communicate. CPUs do both with the same cores.
        sharding_us: microseconds of Python around a collective of FSDP; zero where the device computes meanwhile.
    """

    devices_per_node: int
    memory_gib: float
    within: dict[str, float]
    between: dict[str, float]
    memory_gb_per_s: float
    tflops: dict[str, float] | None = None
    price_per_hour: float | None = None
    overlaps: bool = True
    sharding_us: float = 0.0

    def message_seconds(self, is_within_node: bool, nbytes: float, messages: float) -> float:
        """Return the seconds of some messages between two devices, which have `nbytes` bytes together."""
        link = self.within if is_within_node else self.between
        return messages * link["us"] * 1e-6 + nbytes / (link["gb_per_s"] * 1e9)

    def copy_seconds(self, nbytes: float) -> float:
        """Return the seconds in which a device reads or writes some bytes of its memory."""
        return nbytes / (self.memory_gb_per_s * 1e9)

    def operation_seconds(self, flops: float, nbytes: float, is_convolution: bool, precision: str) -> float:
        """Return the seconds of an operation by the roofline model (Williams, Waterman and Patterson, 2009)."""
        dtype = dtype_name(precision)
        assert self.tflops
        assert dtype  # a name of torch's, in which the CPU has trained for the profile
        rate = self.tflops["tf32" if is_convolution and dtype == "float32" else _RATES[dtype]] * 1e12 * _EFFICIENCY
        return max(flops / rate, self.copy_seconds(nbytes), _LAUNCH)


def _read_cache() -> dict[str, Any]:
    """Return what was measured before; an unreadable file is no reason to end a run."""
    with suppress(OSError, ValueError):
        content = json.loads((PROJECT / "runs" / _FILE).read_text())
        return content if isinstance(content, dict) else {}
    return {}


def _update_cache(values: dict[str, Any]) -> None:
    """Add some values to the file, if it can be written. Of two writers at once the last one wins."""
    file = PROJECT / "runs" / _FILE
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        with atomic_write(file) as part:
            part.write_text(json.dumps(_read_cache() | values, indent=1))


def this_machine(price_per_hour: float | None = None) -> Hardware:
    """Return the hardware of this machine, which is measured once for each version of torch."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    name = f"{socket.gethostname()}, {gpus} GPUs, {os.cpu_count()} cores, torch {torch.__version__}"
    measured = _read_cache().get(name)
    if not (isinstance(measured, dict) and measured.keys() == _FIGURES):  # none, or those of another version
        measured = _measure(gpus)
        _update_cache({name: measured})
    if gpus:
        memory = torch.cuda.get_device_properties(0).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    devices = gpus or len(usable_cores())
    return Hardware(devices, memory / 2**30, price_per_hour=price_per_hour, overlaps=gpus > 0, **measured)


def _measure(gpus: int) -> dict[str, Any]:
    """Return the figures of the link between two GPUs, or two processes on the CPU, of memory and of FSDP."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_measure_as_rank, (folder, gpus > 1), nprocs=2, start_method="spawn")
        small, large, sharding_small, sharding_large, copy = json.loads(Path(folder, "seconds.json").read_text())
    nbytes, larger = (4 * width**2 for width in _WIDTHS)
    # Each of the two ranks sends two messages, with half of the tensor.
    per_byte = max(large - small, 1e-9) / (larger - nbytes)
    link = {"gb_per_s": 1e-9 / per_byte, "us": max(0.0, small - nbytes * per_byte) / 2 * 1e6}
    copied, sharding = copy / _COPIED, 0.0  # a GPU computes while FSDP's Python runs
    if not gpus:
        # FSDP gathers a weight twice and reduces its gradient once, which takes gloo as long as two all-reduces. It
        # copies each of the three, which reads and writes.
        copied = max((sharding_large - 2 * large) - (sharding_small - 2 * small), 1e-9) / (larger - nbytes) / 3
        sharding = max(0.0, sharding_small - 2 * small) / 3
    return {"within": link, "between": link, "memory_gb_per_s": 2e-9 / copied, "sharding_us": sharding * 1e6}


def _measure_as_rank(rank: int, folder: str, uses_gpus: bool) -> None:
    """Write median seconds: of an all-reduce of each weight, of what FSDP adds to a layer with each, and of a copy."""
    device = torch.device("cuda", rank) if uses_gpus else torch.device("cpu")
    if uses_gpus:
        torch.cuda.set_device(rank)  # the timer waits for this one
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("nccl" if uses_gpus else "gloo", store=store, rank=rank, world_size=2)
    weights = [torch.zeros(width, width, device=device) for width in _WIDTHS]
    seconds = [_median("reduce(weight)", reduce=dist.all_reduce, weight=weight) for weight in weights]
    seconds += [_sharding_seconds(width, device) for width in _WIDTHS]
    values = torch.zeros(_COPIED // 4, device=device)
    seconds.append(_median("values.copy_(others)", values=values, others=values.clone()))
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    gc.collect()  # FSDP's cycles hold the process group, with which a process may abort at its end
    close_process_group()


def _sharding_seconds(width: int, device: torch.device) -> float:
    """Return what FSDP adds to the passes of a layer."""
    from torch.distributed.device_mesh import init_device_mesh  # late, because every run imports this file
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS))).to(device)
    passes = partial(_median, "net(inputs).sum().backward()", net=net, inputs=torch.zeros(2, width, device=device))
    alone, mesh = passes(), init_device_mesh(device.type, (2,))
    for module in (*net, net):
        fully_shard(module, mesh=mesh)
    return (passes() - alone) / _LAYERS


def _median(statement: str, **names: Any) -> float:
    from torch.utils.benchmark import Timer

    timer = Timer(statement, globals=names)
    return statistics.median(timer.timeit(1).mean for _ in range(_REPEATS))
