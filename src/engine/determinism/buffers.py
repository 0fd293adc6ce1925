"""Buffers that a network updates in its forward pass, such as running means, must not depend on the hardware."""

from typing import Any

import lightning as L
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from src.engine.determinism.seeding import are_equal
from src.engine.utils.errors import UserError


class BufferCheck(L.Callback):
    """Refuses a network that updates a buffer from the samples of one rank, or once for each micro-batch.

    It compares the buffers before and after the first backward pass of a run. `src/engine/parallel/batch_norm.py` takes
    care of batch normalization.
    """

    def __init__(self) -> None:
        self._before: dict[str, Tensor] | None = None
        self._is_due = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave a network alone that has no buffers, before a pipeline's ranks have different ones."""
        self._is_due = stage == "fit" and bool(_buffers(trainer, pl_module))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._is_due and self._before is None:
            self._before = {name: buffer.clone() for name, buffer in _buffers(trainer, pl_module).items()}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if not self._is_due:
            return
        self._is_due, before = False, self._before or {}
        now = _buffers(trainer, pl_module)  # with those that the network has made in its first pass
        changed = {name: now[name].cpu() for name in before if not are_equal(now[name], before[name])}
        ranks: list[Any] = [changed]
        if trainer.world_size > 1:  # all must stop, also the ranks of a pipeline that do not have the buffer
            ranks = [None] * trainer.world_size
            dist.all_gather_object(ranks, changed)
        for name in sorted(set().union(*ranks)):
            is_same = all(name in rank and are_equal(rank[name], ranks[0][name]) for rank in ranks)
            if not is_same or trainer.datamodule.layout.micro_batches > 1:
                raise UserError(
                    f"{name} is a buffer that the forward pass updates from the samples of one rank, or once for each "
                    "micro-batch, so the run would depend on them: train on one device, or (for micro-batches) without "
                    "trainer.accumulate_grad_batches and pipelines"
                )


def _buffers(trainer: L.Trainer, module: Any) -> dict[str, Tensor]:
    """Return the buffers that could depend on the hardware; a pipeline calls only its network for each micro-batch."""
    part = module.net if trainer.datamodule.parallel.num_microbatches > 1 else module
    norms = tuple(f"{name}." for name, layer in part.named_modules() if isinstance(layer, _BatchNorm))
    return {name: buffer for name, buffer in part.named_buffers() if not name.startswith(norms)}
