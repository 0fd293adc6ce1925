"""Callbacks of the runs that `scripts.dev.bench` starts: the clock, and a rank's memory and time in communication.

They have a file of their own, because the hand-written programs import no Lightning.
"""

import ctypes
import gc
import json
import re
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from scripts.dev.peers.common import Marks

_WINDOW = "benchmark:window"
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Spans = list[tuple[float, float]]


class Clock(L.Callback):
    """Write the times at which steps end."""

    def __init__(self, file: str, every: int) -> None:
        self._marks = Marks(Path(file), every)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            self._marks.step(trainer.global_step)


class Communication(L.Callback):
    """Profile steps `first + 1` to `last`, which follow the timed ones, and write FILE.RANK.json.

    `communicating` is the percentage of their wall-clock time in which a collective, send or receive was in progress;
    overlaps count once. `waiting` is the part of it in which the rank computed nothing. `MB` is the peak memory of the
    steps before: on a GPU torch's allocations; on a CPU the resident set, less its size with the data loaded and
    Lightning imported, the network not counted.
    """

    def __init__(self, file: str, first: int, last: int) -> None:
        self.file, self.first, self.last = file, first, last
        self._base, self._peak = 0.0, 0.0
        self._profiler: Any = None
        self._window: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        network = sum(tensor.nbytes for tensor in pl_module.state_dict().values())
        self._base = resident("VmRSS") - network

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 1 and pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif trainer.global_step == 1:
            _CLEAR.write_text("5")  # resets VmHWM
        if trainer.global_step == self.first and self._profiler is None:
            cuda = pl_module.device.type == "cuda"
            self._peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM") - self._base
            self._profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])])
            self._profiler.start()
        if trainer.global_step == self.first + 1 and self._window is None:  # a profiler's first step is slow
            self._window = record_function(_WINDOW)
            self._window.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == self.last and self._profiler is not None:
            self._window.__exit__(None, None, None)
            self._profiler.stop()
            percentages, self._profiler = busy_percentages(self._profiler.events()), None
            found = {"MB": self._peak / 2**20} | percentages
            Path(f"{self.file}.{trainer.global_rank}.json").write_text(json.dumps(found))


def busy_percentages(events: Any) -> dict[str, float]:
    """Return the percentages of the profiled window in which the rank communicated, and waited for it."""
    window = next(event.time_range for event in events if event.name == _WINDOW)
    on_device = any(event.device_type != torch.autograd.DeviceType.CPU for event in events)
    sending, computing = [], []
    for event in events:
        span = (max(event.time_range.start, window.start), min(event.time_range.end, window.end))
        if re.match(r"gloo:|nccl(Dev)?Kernel", event.name):
            sending.append(span)
        elif event.device_type != torch.autograd.DeviceType.CPU if on_device else _is_work(event):
            computing.append(span)
    wall = (window.end - window.start) / 100
    waiting = union_length(sending + computing) - union_length(computing)
    return {"communicating": union_length(sending) / wall, "waiting": waiting / wall}


def _is_work(event: Any) -> bool:
    """Whether a span on a CPU is an operator, and not one that encloses others and their waits."""
    return event.name.startswith("aten::") and not event.cpu_children


def union_length(spans: Spans) -> float:
    """Return the length of the union of the spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def resident(field: str) -> float:
    """Return bytes: the resident set now without freed memory (`VmRSS`), or its peak (`VmHWM`)."""
    if field == "VmRSS":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
    return 1024 * float(re.search(rf"{field}:\s+(\d+)", _STATUS.read_text())[1])  # type: ignore[index]
