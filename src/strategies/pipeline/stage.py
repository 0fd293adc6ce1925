"""A pipeline stage as a module: consecutive blocks, with the memory formats and dropout keys of their micro-batches."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from src.models.dropout import dropouts, set_keys
from src.strategies.pipeline.micro_batches import split_samples
from src.strategies.pipeline.split import Block


class Stage(nn.Sequential):
    """Consecutive blocks whose input and output are sent in their memory format, without a copy.

    Args:
        blocks: the blocks in order.
        before: the block whose output is the input of this stage; None if the input is the images.
    """

    def __init__(self, blocks: Sequence[Block], before: Block | None) -> None:
        super().__init__(*(block.module for block in blocks))
        self._dropouts = dropouts(self)
        self._keys: Iterator[Tensor] = iter(())
        self._receives_channels_last = before is not None and before.channels_last
        self._sends_channels_last = blocks[-1].channels_last

    def begin(self, microbatches: int) -> None:
        """Split the dropout keys of a batch into micro-batches, as the batch will be split.

        Schedules run the micro-batches of a stage in their order, so `forward` takes the keys one after the other.
        """
        if self._dropouts:
            keys = self._dropouts[0].keys
            assert keys is not None
            self._keys = iter(split_samples(keys, microbatches).contiguous())

    def forward(self, input: Tensor) -> Tensor:
        # Lightning calls `eval` on the blocks and not on the stage, so `self.training` is not reliable.
        if self._dropouts and self._dropouts[0].training:
            keys = next(self._keys, None)
            assert keys is not None, "the schedule runs more micro-batches than `begin` prepared"
            set_keys(self._dropouts, keys)
        output = super().forward(input.permute(0, 3, 1, 2) if self._receives_channels_last else input)
        return _ChannelsLastOutput.apply(output) if self._sends_channels_last else output.contiguous()


def keep_own_stages(
    net: nn.Module, stages: Sequence[Sequence[Block]], stage_to_rank: Sequence[int], own_rank: int
) -> dict[int, Stage]:
    """Remove the blocks of other ranks from the network; return the stages of this rank by their number.

    Args:
        net: the full network; changed in place.
        stages: the blocks of each stage.
        stage_to_rank: rank of each stage.
        own_rank: this rank.
    """
    own = {}
    for number, rank in enumerate(stage_to_rank):
        if rank == own_rank:
            own[number] = Stage(stages[number], before=stages[number - 1][-1] if number else None)
        else:
            for block in stages[number]:
                net.set_submodule(block.name, nn.Identity())
    return own


def build_stage(
    stage: Stage, number: int, shapes: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device
) -> PipelineStage:
    """Build torch's stage with known shapes; shape inference would update the batch statistics once more.

    Args:
        stage: the stage as a module.
        number: its number.
        shapes: meta tensors like the input of each stage, and the output of the last.
        group: ranks of the pipeline.
        device: device of this rank.
    """
    received = shapes[number].detach().requires_grad_(number > 0)  # images need no gradient
    sent = shapes[number + 1].detach().requires_grad_()
    return PipelineStage(
        stage, number, len(shapes) - 1, device, input_args=(received,), output_args=(sent,), group=group
    )


class _ChannelsLastOutput(torch.autograd.Function):
    """Map (n, channels, height, width) in channels last to contiguous (n, height, width, channels), without a copy.

    The result is not a view for autograd. Schedules detach the output of a stage in place, which fails for a view
    (`stage_backward_input` in torch/distributed/pipelining/_backward.py).
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        return output.permute(0, 2, 3, 1).contiguous().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.permute(0, 3, 1, 2)
