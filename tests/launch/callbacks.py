"""Callbacks that tests of sweeps configure."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch


class Fate(L.Callback):
    """In the third step, once W&B knows of the run, on the last rank only: nothing, SIGKILL, or too much memory."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_step != 2 or trainer.global_rank != trainer.world_size - 1:
            return
        files, run_id = Path(trainer.default_root_dir).glob, trainer.loggers[-1].version.encode()
        while not any(run_id in file.read_bytes() for file in files("wandb/*/*.wandb")):
            time.sleep(0.1)
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "memory":
            torch.empty(2**60, dtype=torch.uint8)


class Tell(L.Callback):
    """Each rank writes down the values it was given, the cores it may use, and when it began and ended."""

    def __init__(self, folder: str, **values: Any) -> None:
        self.folder, self.values = Path(folder), values

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began = time.time()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        told = {"values": self.values, "cores": os.sched_getaffinity(0), "span": (self.began, time.time())}
        torch.save(told, self.folder / f"told.{trainer.global_rank}")


class Wait(L.Callback):
    """Takes its time over each step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(self.seconds)
