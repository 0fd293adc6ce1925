"""Callbacks of the runs that `engine.dev.bench` starts: the clock, and a rank's memory and time in communication.

They have a file of their own, because the hand-written programs import no Lightning.
"""

import ctypes
import gc
import json
import re
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from engine.dev.peers.common import Marks

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
    overlaps count once. `MB` is the peak memory of the steps before: on a GPU torch's allocations; on a CPU the
    resident set, less its size with the data loaded and Lightning imported, the network not counted. `CPU ms` is the
    processor time of one of these steps.
    """

    def __init__(self, file: str, first: int, last: int) -> None:
        self.file, self.first, self.last = file, first, last
        self._base, self._peak, self._processor_time = 0.0, 0.0, 0.0
        self._profiler: Any = None
        self._window: Any = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        network = sum(tensor.nbytes for tensor in pl_module.state_dict().values())
        self._base = resident("VmRSS") - network

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step == 1:
            self._processor_time = time.process_time()
        if trainer.global_step == 1 and pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        elif trainer.global_step == 1:
            _CLEAR.write_text("5")  # resets VmHWM
        if trainer.global_step == self.first and self._profiler is None:
            cuda = pl_module.device.type == "cuda"
            self._processor_time = (time.process_time() - self._processor_time) / (self.first - 1)
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
            found = {"MB": self._peak / 2**20, "communicating": communicating(self._profiler.events())}
            found["CPU ms"] = 1000 * self._processor_time
            self._profiler = None
            Path(f"{self.file}.{trainer.global_rank}.json").write_text(json.dumps(found))


def communicating(events: Any) -> float:
    """Return the percentage of the profiled window in which a collective, send or receive was in progress."""
    window = next(event.time_range for event in events if event.name == _WINDOW)
    spans = [
        (max(event.time_range.start, window.start), min(event.time_range.end, window.end))
        for event in events
        if re.match(r"gloo:|nccl(Dev)?Kernel", event.name)
    ]
    return 100 * union_length(spans) / (window.end - window.start)


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
