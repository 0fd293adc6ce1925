"""Recording of one training step: the activities on which this rank spends its time, and the passes of a pipeline.

`callbacks.timeline` starts a recording. Strategies mark what only they know, through the functions of this file. They
cost less than a microsecond while no step is recorded, and nothing in compiled code, where they have no effect.
"""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

COMPUTATION, COMMUNICATION = "forward_backward", "communication"
Pass = tuple[int, int, str, float, float]  # stage, micro-batch, kind, start, end; seconds since the start of the step
_Mark = Any  # a CUDA event, or seconds of `time.perf_counter`


@dataclass(frozen=True)
class RecordedStep:
    """The times of one step on one rank.

    Attributes:
        start: UNIX time.
        spans: seconds of each activity; their sum is the duration of the step.
        passes: the passes of the pipeline, in the order of execution.
    """

    start: float
    spans: dict[str, float]
    passes: list[Pass]

    @property
    def seconds(self) -> float:
        return sum(self.spans.values())

    @property
    def busy_seconds(self) -> float:
        """The time that the rank did not spend in communication, in which it waits for slower ranks."""
        return self.seconds - self.spans.get(COMMUNICATION, 0.0)


class StepRecording:
    """A recording of activities, which may be nested: the time between two marks belongs to the innermost one.

    On a GPU a mark is a CUDA event in the current stream, so that recording does not synchronize host and device.
    Elsewhere it is the time of the host.

    Args:
        device: device of this rank.
        activity: the first activity.
    """

    def __init__(self, device: torch.device, activity: str) -> None:
        self._device = device
        self._activities = [activity]  # from the outermost to the current one
        self._marks: list[tuple[str, _Mark]] = [(activity, self._mark())]  # each activity from its mark to the next
        self._passes: list[tuple[int, int, str, _Mark, _Mark]] = []

    @property
    def activity(self) -> str:
        """The current activity."""
        return self._activities[-1]

    def switch(self, activity: str) -> None:
        """End all activities and begin the next one."""
        self._activities = [activity]
        self._add_mark()

    def begin(self, activity: str) -> None:
        """Begin an activity within the current one."""
        self._activities.append(activity)
        self._add_mark()

    def end(self) -> None:
        """Return to the activity around the current one, if there is one: a `switch` may have ended both."""
        self._activities = self._activities[:-1] or self._activities
        self._add_mark()

    def begin_pass(self) -> None:
        """Begin a pass of a pipeline, which is a forward or backward activity."""
        self.begin(COMPUTATION)
        self._pass_start = self._marks[-1][1]

    def end_pass(self, stage: int, microbatch: int, kind: str) -> None:
        """End the pass that was begun last."""
        self.end()
        self._passes.append((stage, microbatch, kind, self._pass_start, self._marks[-1][1]))

    def finish(self) -> None:
        """End the recording."""
        self._activities = ["end"]
        self._add_mark()

    def resolve(self) -> RecordedStep:
        """Return the measured times. The host waits for the GPU."""
        now_mark = self._mark()
        synchronize(self._device)
        now = time.time()
        spans: dict[str, float] = defaultdict(float)
        for (activity, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            spans[activity] += _seconds_between(start, end)
        first = self._marks[0][1]
        passes = [
            (stage, microbatch, kind, _seconds_between(first, start), _seconds_between(first, end))
            for stage, microbatch, kind, start, end in self._passes
        ]
        return RecordedStep(now - _seconds_between(first, now_mark), dict(spans), passes)

    def _add_mark(self) -> None:
        self._marks.append((self.activity, self._mark()))

    def _mark(self) -> _Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds_between(start: _Mark, end: _Mark) -> float:
    if isinstance(start, float):
        return end - start
    return start.elapsed_time(end) / 1000


def synchronize(device: torch.device) -> None:
    """Wait for the GPU, if the device is one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


_recording: StepRecording | None = None


def set_recording(recording: StepRecording | None) -> None:
    """Set the recording to which the functions below add; None records nothing."""
    global _recording
    _recording = recording


def current_recording() -> StepRecording | None:
    """Return the recording of the current step, if it is recorded; None in compiled code."""
    return None if torch.compiler.is_compiling() else _recording


def communication() -> AbstractContextManager[None]:
    """Return a context in which this rank communicates, and so waits for other ranks."""
    return _activity(COMMUNICATION)


def computation() -> AbstractContextManager[None]:
    """Return a context in which this rank computes, within one in which it communicates."""
    return _activity(COMPUTATION)


def _activity(name: str) -> AbstractContextManager[None]:
    recording = current_recording()
    return _recorded(recording, name) if recording else nullcontext()


@contextmanager
def _recorded(recording: StepRecording, activity: str) -> Iterator[None]:
    recording.begin(activity)
    yield
    recording.end()


@contextmanager
def pipeline_pass(stage: int, microbatch: int, kind: str) -> Iterator[None]:
    """Record a pass of a pipeline.

    Args:
        stage: number of the stage.
        microbatch: number of the micro-batch.
        kind: F (forward), B (backward), I (backward for the inputs) or W (backward for the weights).
    """
    recording = current_recording()
    if recording is None:
        yield
        return
    recording.begin_pass()
    yield
    recording.end_pass(stage, microbatch, kind)
