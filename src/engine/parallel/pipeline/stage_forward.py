"""The forward pass of a pipeline for evaluation: one stage after another, without micro-batches or gradients."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class StageForward:
    """The forward pass of a network whose stages are on the ranks of a group. Every rank must call it.

    Args:
        stages: the stages of this rank by their number.
        stage_to_rank: rank of each stage in the group.
        shapes: meta tensors with shape and type of the inputs of each stage, and of the output of the last. Their batch
            size has no meaning.
        group: ranks of the pipeline.
        device: device of this rank.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        stage_to_rank: Sequence[int],
        shapes: Sequence[Sequence[Tensor]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.stages, self.stage_to_rank, self.shapes = stages, stage_to_rank, shapes
        self.group, self.device = group, device

    def __call__(self, image: Tensor) -> Tensor:
        """Map (n, channels, height, width) images to (n, classes) logits, on every rank."""
        values: tuple[Tensor, ...] = (image,)
        last = len(self.stage_to_rank) - 1
        for number, stage in self.stages.items():
            own_rank = self.stage_to_rank[number]
            if number > 0 and self.stage_to_rank[number - 1] != own_rank:
                values = self._empty(number, len(image))
                for value in values:
                    dist.recv(value, group=self.group, group_src=self.stage_to_rank[number - 1])
            result = stage(*values)
            values = result if isinstance(result, tuple) else (result,)
            if isinstance(stage, FSDPModule):
                stage.reshard()
            if number < last and self.stage_to_rank[number + 1] != own_rank:
                for value in values:
                    dist.send(value, group=self.group, group_dst=self.stage_to_rank[number + 1])
        return self.to_all(values[0] if last in self.stages else None, len(image))

    def to_all(self, logits: Tensor | None, count: int) -> Tensor:
        """Broadcast the (count, classes) logits of the last stage; other ranks pass None."""
        logits = self._empty(-1, count)[0] if logits is None else logits.contiguous()
        dist.broadcast(logits, group=self.group, group_src=self.stage_to_rank[-1])
        return logits

    def _empty(self, number: int, count: int) -> tuple[Tensor, ...]:
        """Return empty tensors for the inputs of stage `number`, with `count` samples; -1 means the logits."""
        return tuple(
            torch.empty(count, *like.shape[1:], dtype=like.dtype, device=self.device) for like in self.shapes[number]
        )
