"""Record where the time goes on each rank, in `timeline/rank*.jsonl` of the run folder."""

import logging
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from onecurve.observe.step_times import (
    COMMUNICATION,
    COMPUTATION,
    RecordedStep,
    StepRecording,
    current_recording,
    set_recording,
    synchronize,
)
from onecurve.observe.steps import is_log_point, trained_steps
from onecurve.patches.torch import call_after_backward
from onecurve.process.devices import peak_memory_mib
from onecurve.records.files import append_json_line

_log = logging.getLogger(__name__)


class Timeline(L.Callback):
    """Writes a line of JSON at each log point: the seconds of each activity since the last one.

    Validation and saving are measured whenever they happen. The activities of a step are measured in one step per
    interval, the one before the log point, and scaled to the interval. They are:

    `data`: from the end of a step until the batch is on the device, augmented, and all callbacks have run.
    `forward_backward`: computation of network and loss; in a pipeline the passes of all micro-batches.
    `communication`: time for which the computation waits for other ranks: for synchronized batch normalization, for the
    gradients of DDP after the backward pass, for the weights and gradients of FSDP, for the other stages of a pipeline.
    `optimizer`: clipping, update and schedule; with it their communication, such as that of `strategy.shard_optimizer`
    and of `post_local_sgd`.

    An interval without a recorded step, such as the first step, has `other` in their place. On a CPU the times are
    those of the host. On a GPU they are differences of CUDA events in the stream of the computation, so that the idle
    time of a GPU belongs to the activity for which it waits. Communication that overlaps with computation is not
    counted, nor is communication inside a network that `module.compile` compiles.

    A line of a pipeline's passes precedes that of the interval; validations and saves have lines of their own as well.

    Args:
        folder: where each rank appends to its file. The first line of each process names its host.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        # Of the interval that ended last: the recorded step, and the seconds per step without validation and saving.
        self.recorded: RecordedStep | None = None
        self.step_seconds: float | None = None
        self._file: Path | None = None  # None while nothing is written
        self._device = torch.device("cpu")
        self._recording: StepRecording | None = None  # of this interval; `current_recording` while it goes on
        self._recorded_step = 0  # its number

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()
        self._file = self.folder / f"rank{trainer.global_rank}.jsonl"
        self._device, self._last_step, self._start = pl_module.device, trained_steps(trainer), time.time()
        self._pauses: dict[str, float] = defaultdict(float)  # seconds of validation and saving in this interval
        process = {"rank": trainer.global_rank, "host": platform.node(), "pid": os.getpid(), "start": self._start}
        self._write("process", process)
        trainer.save_checkpoint = partial(self._save, trainer.save_checkpoint)  # type: ignore[method-assign]

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        _switch(COMPUTATION)

    on_after_backward = on_train_batch_start

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        if current_recording() and dist.is_initialized() and loss.requires_grad:  # a pipeline has no backward left
            loss.register_hook(_record_wait)

    def on_before_optimizer_step(self, *_: Any) -> None:
        _switch("optimizer")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        _switch("data")  # of the next batch; it ends a recording of this step
        if self._file is None:
            return
        set_recording(None)
        step = trained_steps(trainer)
        if is_log_point(trainer, step):
            self._write_interval(step)
        if is_log_point(trainer, step + 2):  # then the next step is the one before a log point
            self._record("data")
            self._recorded_step = step + 1

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._validation_start = self._now()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._end_pause("validation", self._validation_start)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write what followed the last log point, such as the last validation."""
        if self._file:
            self._write_interval(trained_steps(trainer))
        self.on_exception(trainer)

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        vars(trainer).pop("save_checkpoint", None)
        self._stop()

    def _save(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint by `Trainer.save_checkpoint`, which has a hook before, but none after."""
        start = self._now()
        save(*args, **kwargs)
        self._end_pause("save", start)

    def _now(self) -> float:
        """Return the time at which the GPU has done what is queued, which belongs to the steps before."""
        synchronize(self._device)
        return time.time()

    def _end_pause(self, name: str, start: float) -> None:
        """Record what is no part of a step."""
        if self._file is None:
            return
        seconds = self._now() - start
        self._pauses[name] += seconds
        self._write("span", {"name": name, "start": start, "seconds": round(seconds, 6)})
        if recording := current_recording():  # this is no part of the step, so it begins anew
            self._record(recording.activity)

    def _record(self, activity: str) -> None:
        self._recording = StepRecording(self._device, activity)
        set_recording(self._recording)

    def _write_interval(self, step: int) -> None:
        now = self._now()
        self.recorded = self._recording.resolve() if self._recording else None
        if self.recorded and self.recorded.passes:
            passes = [[*which, round(start, 6), round(end, 6)] for *which, start, end in self.recorded.passes]
            self._write("passes", {"step": self._recorded_step, "start": self.recorded.start, "passes": passes})
        training, steps = now - self._start - sum(self._pauses.values()), step - self._last_step
        interval = {"step": step, "steps": steps, "start": self._start, "seconds": now - self._start}
        self.step_seconds = training / steps if steps else None
        # The activities of the recorded step, scaled to the seconds of training.
        recorded = self.recorded.spans if self.recorded and self.recorded.seconds else {"other": 1.0}
        spans = {name: training * part / sum(recorded.values()) for name, part in recorded.items()} | self._pauses
        spans = {name: round(value, 6) for name, value in spans.items()}
        self._write("interval", interval | {"spans": spans, "peak_memory_mib": peak_memory_mib(self._device)})
        self._last_step, self._start, self._recording = step, now, None
        self._pauses.clear()

    def _write(self, kind: str, line: dict[str, Any]) -> None:
        """Append a line. If that fails, such as on a full disk, training continues without the timeline."""
        if self._file is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            append_json_line(self._file, {"kind": kind} | line)
        except OSError as error:
            _log.warning("callbacks.timeline stops, and training continues: %s", error)
            self._stop()

    def _stop(self) -> None:
        set_recording(None)
        self.recorded = self.step_seconds = self._recording = self._file = None


def _switch(activity: str) -> None:
    if recording := current_recording():
        recording.switch(activity)


def _record_wait(_: Tensor) -> None:
    """Record the end of the backward pass as communication: DDP and FSDP then wait for the gradients.

    The engine calls back in the order of the requests after all nodes of the backward pass. This hook of the loss is
    called first, so its request precedes those of DDP and FSDP.
    """
    call_after_backward(partial(_switch, COMMUNICATION))
