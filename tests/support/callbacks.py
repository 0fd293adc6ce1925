"""Callbacks for runs that the command line starts: they delay, hang, raise, kill or report."""

import atexit
import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from onecurve.process import signals
from onecurve.records.events import read_events
from onecurve.run.stopping import Watchdog


class Slow(L.Callback):
    """Sleep `seconds` in each step from the step `since` on, and a minute in step `at`."""

    def __init__(self, seconds: float, at: int | None = None, since: int = 0) -> None:
        self.seconds, self.at, self.since = seconds, at, since

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.since:
            time.sleep(60 if trainer.global_step == self.at else self.seconds)


class WaitForSignal(L.Callback):
    """On the last rank, wait in step `at` until a signal asks it to stop, if the run has this world size."""

    def __init__(self, at: int, world_size: int | None = None) -> None:
        self.at, self.world_size = at, world_size

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        is_concerned = trainer.global_rank == trainer.world_size - 1 and self.world_size in (None, trainer.world_size)
        while is_concerned and trainer.global_step == self.at and not signals.requested():
            time.sleep(0.05)


class WaitForKills(L.Callback):
    """Wait in step `at` until the run has been killed so many times."""

    def __init__(self, at: int, kills: int) -> None:
        self.at, self.kills = at, kills

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        while trainer.global_step == self.at and count_kills(trainer) < self.kills:
            time.sleep(0.05)


class DieOnRankOne(L.Callback):
    """Kill rank one in step `at`, unless the run has been killed so many times."""

    def __init__(self, at: int, kills: int) -> None:
        self.at, self.kills = at, kills

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == self.at and count_kills(trainer) < self.kills:
            os.kill(os.getpid(), signal.SIGKILL)


def count_kills(trainer: L.Trainer) -> int:
    """Return how many times a run has been killed."""
    return sum(event["event"] == "killed" for event in read_events(Path(trainer.default_root_dir)))


class Breakpoint(L.Callback):
    """Enter the debugger in the third step, on each rank."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            breakpoint()


class HangOnRankOne(L.Callback):
    """Hang in the third step, on rank one only, whose timer is short from then on."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank != 1 or trainer.global_step != 2:
            return
        (watchdog,) = [callback for callback in trainer.callbacks if isinstance(callback, Watchdog)]
        watchdog.timeout, watchdog._last_start = 1.0, 0.0
        watchdog._restart_timer()
        while True:
            time.sleep(1)


class RaiseOnRankOne(L.Callback):
    """Raise in the third step, on rank one only; its exit handlers wait, as one of Lightning does for NCCL's peers."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            atexit.register(time.sleep, 100)
            raise RuntimeError("only here")


class SmallMemory(L.Callback):
    """Raise torch's error for a full device if a micro-batch has more than `samples`."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, *_: Any) -> None:
        largest = max(len(part.sample_index) for part in trainer.datamodule.parts)
        if largest > self.samples:
            raise torch.OutOfMemoryError(f"{largest} samples")


class FailOnLastRank(L.Callback):
    """Do nothing, kill the process or exhaust memory, in the third step on the last rank.

    It waits until W&B has recorded the run.
    """

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step != 2 or trainer.global_rank != trainer.world_size - 1:
            return
        folder, run_id = Path(trainer.default_root_dir), trainer.loggers[0].version.encode()
        while not any(run_id in file.read_bytes() for file in folder.glob("wandb/*/*.wandb")):
            time.sleep(0.1)
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "memory":
            torch.empty(2**60, dtype=torch.uint8)


class Report(L.Callback):
    """Write from each rank its given values, its cores, and the start and end of training."""

    def __init__(self, folder: str, **values: Any) -> None:
        self.folder, self.values = Path(folder), values

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began = time.time()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        report = {"values": self.values, "cores": os.sched_getaffinity(0), "span": (self.began, time.time())}
        torch.save(report, self.folder / f"report.{trainer.global_rank}")


class SampleReport(L.Callback):
    """Write the samples of each step, for tests that kill the run.

    Steps and validation sleep, and checkpoints hold extra megabytes, so that kills can hit them.
    """

    def __init__(self, folder: str, step: float = 0.2, validation: float = 0.7) -> None:
        self.folder, self.step, self.validation = Path(folder), step, validation

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(self.step)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with (self.folder / f"samples.{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.global_step - 1} {' '.join(map(str, batch.sample_index.tolist()))}\n")

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(self.validation)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["ballast"] = torch.ones(4_000_000)
