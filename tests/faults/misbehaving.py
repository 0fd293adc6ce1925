"""Callbacks that go wrong on purpose, for runs by the real command line."""

import time
from pathlib import Path
from typing import Any

import lightning as L
import torch


class Slow(L.Callback):
    """Makes each step last so many seconds, and step number `at` a minute."""

    def __init__(self, seconds: float, at: int | None = None) -> None:
        self.seconds, self.at = seconds, at

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        time.sleep(60 if trainer.global_step == self.at else self.seconds)


class HangOnRankOne(L.Callback):
    """Waits for ever in the third step, on rank one only."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        while trainer.global_rank == 1 and trainer.global_step == 2:
            time.sleep(1)


class Phases(L.Callback):
    """Writes down what the run is doing, and which samples each step was trained on, for whoever kills it.

    It also makes validation and checkpoints last long enough to be hit: the latter by megabytes that are written.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def _enter(self, trainer: L.Trainer, phase: str) -> None:
        if trainer.is_global_zero:
            (self.folder / "phase").write_text(phase)

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._enter(trainer, "training")

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._enter(trainer, "training")
        time.sleep(0.2)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with (self.folder / f"samples.{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.global_step - 1} {' '.join(map(str, batch.sample_index.tolist()))}\n")

    def on_validation_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._enter(trainer, "validation")
        time.sleep(0.7)

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._enter(trainer, "ending")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._enter(trainer, "saving")
        checkpoint["ballast"] = torch.rand(4_000_000)
