"""Buffers that a network updates in its forward pass, such as running means, must not depend on the hardware."""

from typing import Any

import lightning as L
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from src.engine.determinism.samples import are_equal
from src.engine.utils.errors import UserError


class BufferCheck(L.Callback):
    """Refuses a network that updates a buffer from the samples of one rank, or once for each micro-batch.

    It compares the buffers before and after the first backward pass of a run. `src/engine/parallel/batch_norm.py` takes
    care of batch normalization.
    """

    def __init__(self) -> None:
        self._before: dict[str, Tensor] | None = None
        self._is_done = True

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Leave a network alone that has no buffers, before a pipeline's ranks have different ones."""
        self._is_done = stage != "fit" or not _buffers(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._before is None and not self._is_done:
            self._before = {name: buffer.clone() for name, buffer in _buffers(trainer, pl_module).items()}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if self._is_done:
            return
        self._is_done, layout = True, trainer.datamodule.layout
        assert self._before is not None
        own = {}  # buffers that have changed, and None for others; the network may have made new ones
        for name, buffer in _buffers(trainer, pl_module).items():
            before = self._before.get(name)
            own[name] = None if before is None or _are_equal(buffer, before) else buffer.cpu()
        self._before = None
        ranks: list[Any] = [own]
        if trainer.world_size > 1:  # a pipeline's ranks have different buffers; all must stop
            ranks = [None] * trainer.world_size
            dist.all_gather_object(ranks, own)
        for name in sorted({name for rank in ranks for name in rank}):
            first, *others = (rank[name] for rank in ranks if name in rank)
            is_same = all(_are_equal(first, other) for other in others)
            if not is_same or (first is not None and layout.micro_batches > 1):
                raise UserError(
                    f"{name} is a buffer that the forward pass updates from the samples of one rank, or once for each "
                    "micro-batch, so the run would depend on them: train on one device, or (for micro-batches) without "
                    "trainer.accumulate_grad_batches and pipelines"
                )


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other if one is None or other is None else are_equal(one, other)


def _buffers(trainer: L.Trainer, module: Any) -> dict[str, Tensor]:
    """Return the buffers that could depend on the hardware; a pipeline calls only its network for each micro-batch."""
    part = module.net if trainer.datamodule.parallel.num_microbatches > 1 else module
    norms = tuple(f"{name}." for name, layer in part.named_modules() if isinstance(layer, _BatchNorm))
    return {name: buffer for name, buffer in part.named_buffers() if not name.startswith(norms)}
