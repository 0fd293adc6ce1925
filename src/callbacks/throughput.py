"""How fast training goes."""

import time
from typing import Any

import lightning as L


class Throughput(L.Callback):
    """Logs `throughput/samples_per_sec`, over all processes, between log points; validation is not counted."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._steps = 0

    def on_train_batch_start(self, *_: Any) -> None:
        if self._since is None:
            self._since = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        self._steps += 1
        if trainer.global_step % trainer.log_every_n_steps == 0 and self._since is not None:
            data: Any = trainer.datamodule
            rate = self._steps * data.global_batch_size / (time.perf_counter() - self._since)
            pl_module.log("throughput/samples_per_sec", rate)
            self._since, self._steps = None, 0

    def on_validation_start(self, *_: Any) -> None:
        self._since, self._steps = None, 0
