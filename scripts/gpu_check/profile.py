"""torch's profiler on some steps of the default model: kernels per step, and the share of time the GPU is busy."""

import json
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity

from scripts.gpu_check.case import Session, expect
from scripts.gpu_check.training import run

FIRST, STEPS = 20, 10  # the first profiled step, and the number of them
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events in a trace
_LAUNCHES = ("LaunchKernel", "GraphLaunch")


class ProfileSteps(L.Callback):
    """Write a trace of `STEPS` steps without a log point among them to `file`."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.profiler: Any = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == FIRST:
            activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + torch.cuda.is_available()]
            self.profiler = torch.profiler.profile(activities=activities)
            self.profiler.start()
        elif trainer.global_step == FIRST + STEPS:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.profiler.stop()
            self.profiler.export_chrome_trace(self.file)


def profile(session: Session) -> str:
    """Profile the default model on one device; on a CPU, count its operations."""
    file, size = session.folder / "trace.json", ["model.width=4", "data.batch_size=8"] * (not session.on_gpu)
    callback = f"+callbacks.profile={{_target_: scripts.gpu_check.profile.ProfileSteps, file: {file}}}"
    data = ["data.source.train_size=8000", "data.source.test_size=500", "test=false"]
    length = [f"trainer.max_steps={FIRST + 2 * STEPS}", f"trainer.log_every_n_steps={FIRST + 2 * STEPS}"]
    run(session, "run", *data, *size, *length, callback)
    events = json.loads(file.read_text())["traceEvents"]
    if not session.on_gpu:
        operations = sum(event.get("cat") == "cpu_op" for event in events)
        expect(operations > 0, "the trace has no operation")
        return f"{operations / STEPS:.0f} operations per step, nested ones included"
    work = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in _DEVICE_WORK]
    expect(bool(work), "the trace has no kernel: may this user profile the GPU?")
    launches = sum(any(name in event.get("name", "") for name in _LAUNCHES) for event in events)
    return f"{launches / STEPS:.0f} launches, {len(work) / STEPS:.0f} kernels per step; GPU busy {busy_share(work):.0%}"


def busy_share(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the part of the time from the first start to the last end that the intervals cover."""
    ordered = sorted(intervals)
    begin = end = ordered[0][0]
    covered = 0.0
    for start, stop in ordered:
        covered += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return covered / (end - begin)
