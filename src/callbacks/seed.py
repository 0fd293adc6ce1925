"""Seed the random numbers of each step, so that a resumed run draws the same ones."""

from typing import Any

import lightning as L
import torch

from src.data.hashing import hash_ints
from src.models.dropout import SampleDropout, dropouts, set_keys


class SeedEachStep(L.Callback):
    """Sets the samples' keys of dropout layers, and seeds torch with a hash of (seed, epoch, batch, rank).

    A resumed run therefore draws the same numbers as an uninterrupted one, and the stages of a pipeline draw different
    numbers. The numbers of torch's generators depend on the world size; dropout does not use them.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._rank, self._device_type = 0, "cpu"
        self._dropouts: list[SampleDropout] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._rank = trainer.global_rank
        self._device_type = pl_module.device.type
        self._dropouts = dropouts(pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._dropouts:
            data: Any = trainer.datamodule
            set_keys(self._dropouts, hash_ints(self.seed, trainer.current_epoch, data.sample_index))
        step_seed = hash((self.seed, trainer.current_epoch, batch_idx, self._rank))
        # torch.manual_seed would record a stack trace for each unused device type, which takes half a millisecond.
        torch.default_generator.manual_seed(step_seed)
        if self._device_type == "cuda":
            for generator in torch.cuda.default_generators:  # one process may drive several devices
                generator.manual_seed(step_seed)
        elif self._device_type == "mps":
            torch.mps.manual_seed(step_seed)
