"""Recording of one training step: the activities on which this rank spends its time, and the passes of a pipeline.

`callbacks.timeline` starts a recording. Strategies mark what only they know, through the functions of this file. They
cost a microsecond while no step is recorded, and nothing in compiled code, where they have no effect.

torch.profiler is no alternative on a GPU: once it has run, CUPTI slows down the rest of the training
(https://github.com/pytorch/pytorch/issues/144455).
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, _GeneratorContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from onecurve.patches.fsdp import communication_in

COMPUTATION, COMMUNICATION = "forward_backward", "communication"
_Mark = Any  # a CUDA event, or seconds of `time.perf_counter`


@dataclass(frozen=True)
class RecordedStep:
    """The times of one step on one rank.

    Attributes:
        start: UNIX time.
        spans: seconds of each activity; their sum is the duration of the step.
        passes: the passes of the pipeline in the order of execution: stage, micro-batch, kind, and the seconds from the
            start of the step to its start and to its end.
    """

    start: float
    spans: dict[str, float]
    passes: list[tuple[int, int, str, float, float]]

    @property
    def seconds(self) -> float:
        return sum(self.spans.values())

    @property
    def busy_seconds(self) -> float:
        """The time that the rank did not spend in communication, in which it waits for slower ranks."""
        return self.seconds - self.spans.get(COMMUNICATION, 0.0)


class StepRecording:
    """A recording of a step, each moment of which belongs to one activity.

    On a GPU a mark is a CUDA event in the current stream, so that recording does not synchronize host and device.
    Elsewhere it is the time of the host.
    """

    def __init__(self, device: torch.device, activity: str) -> None:
        self.passes: list[tuple[int, int, str, _Mark, _Mark]] = []  # stage, micro-batch, kind, start, end
        self._device = device
        self._marks: list[tuple[str, _Mark]] = []  # each activity lasts from its mark to the next one
        self.switch(activity)

    def switch(self, activity: str) -> _Mark:
        """End the current activity and begin the next one, at the mark that is returned."""
        self.activity = activity
        mark = self._mark()
        self._marks.append((activity, mark))
        return mark

    def resolve(self) -> RecordedStep:
        """Return the times from the first to the last mark. The host waits for the GPU."""
        now_mark = self._mark()
        synchronize(self._device)
        now, first = time.time(), self._marks[0][1]
        spans: dict[str, float] = defaultdict(float)
        for (activity, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            spans[activity] += _seconds_between(start, end)
        passes = [
            (stage, microbatch, kind, _seconds_between(first, start), _seconds_between(first, end))
            for stage, microbatch, kind, start, end in self.passes
        ]
        return RecordedStep(now - _seconds_between(first, now_mark), dict(spans), passes)

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds_between(start: _Mark, end: _Mark) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_recording: StepRecording | None = None
_of_fsdp = ExitStack()


def set_recording(recording: StepRecording | None) -> None:
    """Set the recording to which the functions below, and FSDP, add; None records nothing."""
    global _recording
    _recording = recording
    _of_fsdp.close()
    if recording:
        _of_fsdp.enter_context(communication_in(timed_communication()))


def current_recording() -> StepRecording | None:
    """Return the recording of the current step, if it is recorded; None in compiled code."""
    return None if torch.compiler.is_compiling() else _recording


def timed_communication() -> _GeneratorContextManager[None]:
    """Return a context, which is also a decorator, in which this rank communicates, and so waits for other ranks."""
    return _recorded(COMMUNICATION)


def timed_computation() -> _GeneratorContextManager[None]:
    """Return a context in which this rank computes, within one in which it communicates."""
    return _recorded(COMPUTATION)


@contextmanager
def _recorded(activity: str, *which: Any) -> Iterator[None]:
    recording = current_recording()
    if recording is None:
        yield
        return
    outer, start = recording.activity, recording.switch(activity)
    yield
    end = recording.switch(outer)
    if which:
        recording.passes.append((*which, start, end))


def pipeline_pass(stage: int, microbatch: int, kind: str) -> _GeneratorContextManager[None]:
    """Return a context for a pass of a pipeline: F (forward), B (backward), or its parts I (inputs) and W (weights)."""
    return _recorded(COMPUTATION, stage, microbatch, kind)
