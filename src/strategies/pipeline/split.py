"""Splitting a network into pipeline stages: before named blocks, or such that the stages have similar cost."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from src.models.dropout import dropouts, set_keys
from src.utils.errors import UserError, nearest

_FLOPS_PER_BYTE = 100  # rough number of FLOPs that a device does while a link sends one byte


@dataclass
class Block:
    """One block of a network and its cost for a micro-batch.

    Attributes:
        name: name of the block in the network.
        module: the block.
        parameters: number of parameters.
        flops: FLOPs of the forward pass.
        output: meta tensor with shape, type and memory format of the output.
    """

    name: str
    module: nn.Module
    parameters: int
    flops: int
    output: Tensor

    @property
    def bytes_sent(self) -> int:
        return self.output.numel() * self.output.element_size()

    @property
    def channels_last(self) -> bool:
        return not self.output.is_contiguous() and self.output.is_contiguous(memory_format=torch.channels_last)

    @property
    def sent(self) -> Tensor:
        """The output as it is sent. It must be contiguous: (n, height, width, channels) for channels last."""
        return self.output.permute(0, 2, 3, 1) if self.channels_last else self.output.contiguous()


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
        self._channels_last = (before is not None and before.channels_last, blocks[-1].channels_last)

    def begin(self, microbatches: int) -> None:
        """Split the dropout keys of a batch into micro-batches, as the batch will be split.

        Schedules run the micro-batches of a stage in their order, so `forward` takes the keys one after the other.
        """
        if self._dropouts:
            assert self._dropouts[0].keys is not None
            self._keys = iter(self._dropouts[0].keys.unflatten(0, (-1, microbatches)).T.contiguous())

    def forward(self, input: Tensor) -> Tensor:
        # Lightning calls `eval` on the blocks and not on the stage, so `self.training` is not reliable.
        if self._dropouts and self._dropouts[0].training:
            keys = next(self._keys, None)
            assert keys is not None, "more micro-batches than the batch was taken apart into"
            set_keys(self._dropouts, keys)
        given, gives = self._channels_last
        output = super().forward(input.permute(0, 3, 1, 2) if given else input)
        if not gives:
            return output.contiguous()
        sent = output.permute(0, 2, 3, 1).contiguous()
        # Zero-bubble schedules detach the output in place, which autograd does not allow for a view.
        return torch.ops.aten._unsafe_view(sent, sent.shape)


def ordered_blocks(net: nn.Module, images: Tensor) -> list[Block]:
    """Return the blocks of the network in order, with their cost for a micro-batch.

    An `nn.Sequential` of composite modules counts as several blocks.

    Args:
        net: network with its blocks as children.
        images: (n, channels, height, width) micro-batch of any values.
    """
    was_training, blocks, x = net.training, [], images
    net.eval()  # the running statistics of batch normalization must not change
    with torch.no_grad():
        for name, module in _leaves(net):
            with FlopCounterMode(display=False) as counter:
                x = module(x)
            size = sum(weight.numel() for weight in module.parameters())
            blocks.append(Block(name, module, size, counter.get_total_flops(), torch.empty_like(x, device="meta")))
    net.train(was_training)
    return blocks


def cut(blocks: Sequence[Block], stages: int, split: str | Sequence[str]) -> list[list[Block]]:
    """Return the blocks of each stage.

    Args:
        blocks: all blocks of the network, in order.
        stages: number of stages.
        split: `auto`, which minimizes the cost of the most expensive stage in FLOPs and bytes sent; or the names of the
            blocks before which to cut.

    Raises:
        UserError: if there are more stages than blocks with parameters, a block does not exist, the number of cuts is
            wrong, or a stage has no parameters.
    """
    weighted = sum(block.parameters > 0 for block in blocks)
    if stages > weighted:
        raise UserError(
            f"strategy=pipeline: {stages} stages, but `model` has {weighted} blocks with parameters: lower "
            "trainer.devices (interleaved and zero-bubble schedules make two stages per process)"
        )
    cuts = _balanced(blocks, stages) if isinstance(split, str) else _named(blocks, stages, split)
    parts = [list(blocks[first:last]) for first, last in pairwise([0, *cuts, len(blocks)])]
    for part in parts:
        if not any(block.parameters for block in part):
            raise UserError(f"strategy.split: a stage of {part[0].name} alone has no parameters; cut elsewhere")
    return parts


def table(stages: Sequence[Sequence[Block]], stage_to_rank: Sequence[int]) -> list[str]:
    """Return a table of the stages as lines: rank, parameters, fraction of the FLOPs, and MiB sent per micro-batch."""
    total = sum(block.flops for blocks in stages for block in blocks) or 1
    lines = ["  stage  rank  parameters  cost   sends       blocks"]
    for number, (blocks, owner) in enumerate(zip(stages, stage_to_rank, strict=True)):
        size = sum(block.parameters for block in blocks)
        cost = sum(block.flops for block in blocks) / total
        sent = blocks[-1].bytes_sent / 2**20 if number < len(stages) - 1 else 0.0
        names = blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} ... {blocks[-1].name}"
        lines.append(f"  {number:<5}  {owner:<4}  {size:<10,}  {cost:<5.0%}  {sent:6.2f} MiB  {names}")
    return lines


def _leaves(net: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks with their names; the parts of an `nn.Sequential` of composite modules are blocks themselves."""
    for name, child in net.named_children():
        parts = list(child.children())
        if isinstance(child, nn.Sequential) and all(any(True for _ in part.children()) for part in parts):
            yield from _leaves(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _named(blocks: Sequence[Block], stages: int, split: Sequence[str]) -> list[int]:
    """Return the indices of the blocks before which to cut.

    A name may be that of a sequence of blocks; the cut is then before its first block.
    """
    names = [block.name for block in blocks]
    cuts = []
    for wanted in split:
        found = [place for place, name in enumerate(names) if name == wanted or name.startswith(f"{wanted}.")]
        if not found or found[0] == 0:
            raise UserError(f"strategy.split: no cut can be before {wanted}; {nearest(wanted, names[1:])}")
        cuts.append(found[0])
    if len(cuts) != stages - 1 or cuts != sorted(set(cuts)):
        raise UserError(f"strategy.split={list(split)}: {stages} stages take {stages - 1} cuts, in the blocks' order")
    return cuts


def _balanced(blocks: Sequence[Block], stages: int) -> list[int]:
    """Return the cuts that minimize the cost of the most expensive stage.

    The algorithm is dynamic programming over (stages, blocks).
    """

    def cost(first: int, last: int) -> float:
        if not any(block.parameters for block in blocks[first:last]):
            return math.inf  # every stage must have parameters to train
        sent = blocks[last - 1].bytes_sent if last < len(blocks) else 0
        return sum(block.flops for block in blocks[first:last]) + sent * _FLOPS_PER_BYTE

    best: dict[tuple[int, int], tuple[float, list[int]]] = {
        (1, last): (cost(0, last), []) for last in range(1, len(blocks) + 1)
    }
    for count in range(2, stages + 1):
        for last in range(count, len(blocks) + 1):
            options = [
                (max(best[count - 1, middle][0], cost(middle, last)), [*best[count - 1, middle][1], middle])
                for middle in range(count - 1, last)
            ]
            best[count, last] = min(options)
    return best[stages, len(blocks)][1]
