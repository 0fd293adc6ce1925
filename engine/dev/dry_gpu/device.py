"""Stubs of `torch.cuda`: a GPU of 80 GB that does nothing, whose synchronizations are recorded.

Each replaces a function that would initialize CUDA, which a build of torch for CPUs lacks.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from engine.dev.dry_gpu.cases import DEVICES
from engine.dev.dry_gpu.synchronizations import SYNCHRONIZATIONS

_MEMORY = 80 << 30  # bytes
# torch.compile reads most of these properties, and Lightning's throughput monitor reads the name.
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=_MEMORY,
    multi_processor_count=132,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
)


class Stream:
    """A stream whose work is always done."""

    device, stream_id, device_index, device_type, cuda_stream = torch.device("cuda", 0), 0, 0, 1, 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None:
        SYNCHRONIZATIONS.report("Stream.synchronize")

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *error: object) -> None: ...


class Event:
    """An event that has always happened, a millisecond before the next one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None:
        SYNCHRONIZATIONS.report("Event.synchronize")

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    def query(self) -> bool:
        return True


class _Generator:
    """A generator of random numbers, of which fake tensors need none."""

    def manual_seed(self, seed: int) -> "_Generator":
        return self


def install_device(current: int) -> None:
    """Replace the functions of `torch.cuda`; `current` is the index of this rank's GPU."""
    stream = Stream()
    constants = {
        "is_available": True,
        "_is_compiled": True,
        "is_initialized": True,
        "device_count": DEVICES,
        "_device_count": DEVICES,
        "current_device": current,
        "current_stream": stream,
        "default_stream": stream,
        "mem_get_info": (_MEMORY, _MEMORY),
        "get_device_properties": _PROPERTIES,
        "get_device_name": _PROPERTIES.name,
        "get_device_capability": (_PROPERTIES.major, _PROPERTIES.minor),
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "max_memory_allocated": 0,
        "memory_stats": {},
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": [],
    }
    silent = "_lazy_init init set_device empty_cache reset_peak_memory_stats manual_seed manual_seed_all".split()
    silent += ["set_rng_state", "set_rng_state_all"]
    cuda: Any = torch.cuda
    for name, value in constants.items():
        setattr(cuda, name, _returns(value))
    for name in silent:
        setattr(cuda, name, _returns(None))
    cuda.Stream, cuda.Event, cuda.default_generators = Stream, Event, (_Generator(),) * DEVICES
    cuda.stream = cuda.device = lambda *_: nullcontext()
    cuda.synchronize = lambda *_: SYNCHRONIZATIONS.report("torch.cuda.synchronize")
    torch.accelerator.synchronize = lambda *_: SYNCHRONIZATIONS.report("torch.accelerator.synchronize")


def _returns(value: Any) -> Any:
    return lambda *args, **kwargs: value
