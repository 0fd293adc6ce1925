"""Dropout and whatever else draws from torch's generators: the same after a restart."""

from typing import Any

import lightning as L
import torch


class SeedEachStep(L.Callback):
    """Seeds torch per (seed, epoch, batch, rank).

    So a resumed run draws what the uninterrupted one drew, and the stages of a pipeline draw different numbers. Another
    world size draws other numbers: unlike the data and its augmentation, dropout is not the same for any number of
    processes.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rank, self._kind = 0, "cpu"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rank = trainer.global_rank
        self._kind = pl_module.device.type

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, _: Any, batch_idx: int) -> None:
        number = hash((self.seed, trainer.current_epoch, batch_idx, self._rank))
        # torch.manual_seed would note a stack trace for each kind of device that is not in use: half a millisecond
        torch.default_generator.manual_seed(number)
        if self._kind == "cuda":
            for generator in torch.cuda.default_generators:  # one process may drive several
                generator.manual_seed(number)
        elif self._kind == "mps":
            torch.mps.manual_seed(number)
