"""A callback that fails on one rank."""

from typing import Any

import lightning as L


class RaiseOnRankOne(L.Callback):
    """Raises in the third step, on rank one only."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            raise RuntimeError("only here")
