"""Stages one after another, rank by rank, as evaluation runs them: no micro-batches, no gradients."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class StageForward:
    """The forward pass of a network whose stages lie on the ranks of a group; all of them must call it.

    Args:
        stages: this rank's, by their number.
        stage_to_rank: of each stage, its rank in the group.
        shapes: tensors without memory, as what goes into each stage, and comes out of the last; of any batch size.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        stage_to_rank: Sequence[int],
        shapes: Sequence[Tensor],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self.stages, self.stage_to_rank, self.shapes, self.group, self.device = (
            stages,
            stage_to_rank,
            shapes,
            group,
            device,
        )

    def __call__(self, image: Tensor) -> Tensor:
        """The logits of a batch, (n, classes), on every rank."""
        x, last = image, len(self.stage_to_rank) - 1
        for number, stage in self.stages.items():
            rank = self.stage_to_rank[number]
            if number > 0 and self.stage_to_rank[number - 1] != rank:
                x = self._empty(number, len(image))
                dist.recv(x, group=self.group, group_src=self.stage_to_rank[number - 1])
            x = stage(x)
            if isinstance(stage, FSDPModule):
                stage.reshard()
            if number < last and self.stage_to_rank[number + 1] != rank:
                dist.send(x.contiguous(), group=self.group, group_dst=self.stage_to_rank[number + 1])
        return self.to_all(x if last in self.stages else None, len(image))

    def to_all(self, logits: Tensor | None, count: int) -> Tensor:
        """Send the last stage's logits to every rank; the others give None."""
        logits = self._empty(-1, count) if logits is None else logits.contiguous()
        dist.broadcast(logits, group=self.group, group_src=self.stage_to_rank[-1])
        return logits

    def _empty(self, place: int, count: int) -> Tensor:
        """Memory for what goes into stage `place`, of `count` samples."""
        shape = self.shapes[place]
        return torch.empty(count, *shape.shape[1:], dtype=shape.dtype, device=self.device)
