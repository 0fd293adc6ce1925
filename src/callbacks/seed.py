"""Dropout is the same on any hardware, and whatever draws from torch's generators is the same after a restart."""

import lightning as L
import torch

from src.data.batch import Batch
from src.data.hashing import hash_ints
from src.models.dropout import SampleDropout, dropouts, set_keys


class SeedEachStep(L.Callback):
    """Gives dropout layers their samples' keys, and seeds torch per (seed, epoch, batch, rank).

    So a resumed run draws what the uninterrupted one drew, and the stages of a pipeline draw different numbers. Another
    world size draws other numbers from torch's generators; dropout draws none of them.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rank, self._kind = 0, "cpu"
        self._dropouts: list[SampleDropout] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rank = trainer.global_rank
        self._kind = pl_module.device.type
        self._dropouts = dropouts(pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if self._dropouts:
            set_keys(self._dropouts, hash_ints(self.seed, trainer.current_epoch, batch.sample_index))
        number = hash((self.seed, trainer.current_epoch, batch_idx, self._rank))
        # torch.manual_seed would note a stack trace for each kind of device that is not in use: half a millisecond
        torch.default_generator.manual_seed(number)
        if self._kind == "cuda":
            for generator in torch.cuda.default_generators:  # one process may drive several
                generator.manual_seed(number)
        elif self._kind == "mps":
            torch.mps.manual_seed(number)
