"""Buffers that a network updates in its forward pass, such as running means, must not depend on the hardware."""

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from src.engine.utils.errors import UserError


class BufferCheck(L.Callback):
    """Refuses a network that updates a buffer from the samples of one rank, or once for each micro-batch.

    It compares the buffers before and after the first backward pass of a run. `src/engine/parallel/batch_norm.py` takes
    care of batch normalization.
    """

    def __init__(self) -> None:
        self._before: dict[str, Tensor] | None = None
        self._is_done = False

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._before is None:
            self._before = {name: buffer.clone() for name, buffer in _buffers(trainer, pl_module).items()}

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        if self._is_done:
            return
        self._is_done, layout = True, trainer.datamodule.layout
        assert self._before is not None
        buffers = _buffers(trainer, pl_module)
        changed = [name for name, buffer in buffers.items() if not torch.equal(buffer, self._before[name])]
        if layout.micro_batches == 1 and layout.parallel.dp_size > 1:
            group = (trainer.distributed_sampler_kwargs or {}).get("group", dist.group.WORLD)
            changed = _different_on_ranks({name: buffers[name] for name in changed}, group)
        elif layout.micro_batches == 1:
            return
        if changed:
            raise UserError(
                f"{changed[0]} is a buffer that the forward pass updates from the samples of one rank or micro-batch: "
                "train on one device without micro-batches, or update it in a hook, from values of all ranks"
            )


def _buffers(trainer: L.Trainer, module: Any) -> dict[str, Tensor]:
    """Return the buffers that could depend on the hardware; a pipeline calls only its network for each micro-batch."""
    part = module.net if trainer.datamodule.parallel.num_microbatches > 1 else module
    norms = tuple(f"{name}." for name, layer in part.named_modules() if isinstance(layer, _BatchNorm))
    return {name: buffer for name, buffer in part.named_buffers() if not name.startswith(norms)}


def _different_on_ranks(buffers: dict[str, Tensor], group: Any) -> list[str]:
    """Return the names of the buffers that do not have the same values on all ranks, each of which must call it."""
    values = {name: buffer.cpu() for name, buffer in buffers.items()}
    ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(ranks, values, group=group)
    return [
        name
        for name, value in values.items()
        if not all(name in other and torch.equal(value, other[name]) for other in ranks)
    ]
