"""Dropout and whatever else draws from torch's generators: the same after a restart."""

from typing import Any

import lightning as L
import torch


class SeedEachStep(L.Callback):
    """Seeds torch per (seed, epoch, batch, data-parallel rank).

    So a resumed run draws what the uninterrupted one drew. Another world size draws other numbers: unlike the data
    and its augmentation, dropout is not the same for any number of processes.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, _: Any, batch_idx: int) -> None:
        rank = (trainer.distributed_sampler_kwargs or {"rank": 0})["rank"]
        torch.manual_seed(hash((self.seed, trainer.current_epoch, batch_idx, rank)))
