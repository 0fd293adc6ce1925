"""torch's profiler on some steps of the default model: kernels per step, and the share of time the GPU is busy."""

import json
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch.profiler import ProfilerActivity

from scripts.dev.gpu_check.case import Session, expect
from scripts.dev.gpu_check.runs import run
from scripts.dev.peers.callbacks import union_length

FIRST, STEPS = 20, 10  # the first profiled step, and the number of them
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events in a trace
_LAUNCHES = ("LaunchKernel", "GraphLaunch")  # parts of names of calls, in the two categories of the next line
_CALLS = ("cuda_runtime", "cuda_driver")


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


def profile(compile: bool) -> Callable[[Session], str]:
    """Return the check that profiles the default model in bfloat16 on one device."""

    def check(session: Session) -> str:
        file, size = session.folder / "trace.json", ["model.width=4", "data.batch_size=8"] * (not session.on_gpu)
        callback = f"+callbacks.profile={{_target_: scripts.dev.gpu_check.profile.ProfileSteps, file: {file}}}"
        data = ["data.source.train_size=8000", "data.source.test_size=500", "test=false"]
        length = [f"trainer.max_steps={FIRST + 2 * STEPS}", f"trainer.log_every_n_steps={FIRST + 2 * STEPS}"]
        kind = ["trainer.precision=bf16-mixed", f"module.compile={str(compile).lower()}"]
        run(session, "run", *data, *size, *length, *kind, callback)
        return summary(json.loads(file.read_text())["traceEvents"], session.on_gpu)

    return check


def summary(events: list[dict[str, Any]], on_gpu: bool) -> str:
    """Return the counts per step and the GPU's busy share, which the profiler's own cost lowers."""
    if not on_gpu:
        operations = sum(event.get("cat") == "cpu_op" for event in events)
        expect(operations > 0, "the trace has no operation")
        return f"{operations / STEPS:.0f} operations per step, nested ones included"
    work = [(event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") in _DEVICE_WORK]
    expect(bool(work), "the trace has no kernel: may this user profile the GPU?")
    calls = [event["name"] for event in events if event.get("cat") in _CALLS]
    launches = sum(any(part in name for part in _LAUNCHES) for name in calls)
    busy = union_length(work) / (max(end for _, end in work) - min(start for start, _ in work))
    return f"{launches / STEPS:.0f} launches, {len(work) / STEPS:.0f} kernels per step; GPU busy {busy:.0%}"
