"""Split a network into pipeline stages: before named blocks, or such that the stages have similar cost."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from src.strategies.chain import check_is_chain
from src.utils.errors import UserError, suggest

_FLOPS_PER_BYTE = 100  # rough number of FLOPs that a device does while a link sends one byte


@dataclass
class Block:
    """One block of a network and its cost for a micro-batch.

    Attributes:
        name: name of the block in the network.
        module: the block.
        num_parameters: number of parameters.
        flops: FLOPs of the forward pass.
        output: meta tensor with shape, type and memory format of the output.
    """

    name: str
    module: nn.Module
    num_parameters: int
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


def ordered_blocks(net: nn.Module, images: Tensor) -> list[Block]:
    """Return the blocks of the network in order, with their cost for a micro-batch.

    An `nn.Sequential` of composite modules counts as several blocks.

    Args:
        net: network with its blocks as children.
        images: (n, channels, height, width) micro-batch of any values.

    Raises:
        UserError: if the network is not the chain of its blocks.
    """
    check_is_chain(net, _iterate_blocks(net), images)
    was_training, blocks, x = net.training, [], images
    net.eval()  # the running statistics of batch normalization must not change
    with torch.no_grad():
        for name, module in _iterate_blocks(net):
            with FlopCounterMode(display=False) as counter:
                x = module(x)
            num_parameters = sum(weight.numel() for weight in module.parameters())
            output = torch.empty_like(x, device="meta")
            blocks.append(Block(name, module, num_parameters, counter.get_total_flops(), output))
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
    trainable = sum(block.num_parameters > 0 for block in blocks)
    if stages > trainable:
        raise UserError(
            f"strategy=pipeline: {stages} stages, but `model` has {trainable} blocks with parameters: lower "
            "trainer.devices (interleaved and zero-bubble schedules make two stages per process)"
        )
    cuts = _balanced_cuts(blocks, stages) if isinstance(split, str) else _named_cuts(blocks, stages, split)
    parts = [list(blocks[start:end]) for start, end in pairwise([0, *cuts, len(blocks)])]
    for part in parts:
        if not any(block.num_parameters for block in part):
            raise UserError(f"strategy.split: a stage of {part[0].name} alone has no parameters; cut elsewhere")
    return parts


def format_table(stages: Sequence[Sequence[Block]], stage_to_rank: Sequence[int]) -> list[str]:
    """Return a table of the stages as lines: rank, parameters, fraction of the FLOPs, and MiB sent per micro-batch."""
    total = sum(block.flops for blocks in stages for block in blocks) or 1
    lines = ["  stage  rank  parameters  cost   sends       blocks"]
    for number, (blocks, rank) in enumerate(zip(stages, stage_to_rank, strict=True)):
        num_parameters = sum(block.num_parameters for block in blocks)
        cost = sum(block.flops for block in blocks) / total
        sent = blocks[-1].bytes_sent / 2**20 if number < len(stages) - 1 else 0.0
        names = blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} ... {blocks[-1].name}"
        lines.append(f"  {number:<5}  {rank:<4}  {num_parameters:<10,}  {cost:<5.0%}  {sent:6.2f} MiB  {names}")
    return lines


def _iterate_blocks(net: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of each block; the parts of an `nn.Sequential` of composite modules are blocks."""
    for name, child in net.named_children():
        if isinstance(child, nn.Sequential) and all(_is_composite(part) for part in child):
            yield from _iterate_blocks(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _is_composite(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _named_cuts(blocks: Sequence[Block], stages: int, split: Sequence[str]) -> list[int]:
    """Return the indices of the blocks before which to cut.

    A name can also belong to a sequence of blocks; the cut is then before its first block.
    """
    names = [block.name for block in blocks]
    cuts = []
    for wanted in split:
        matches = [index for index, name in enumerate(names) if name == wanted or name.startswith(f"{wanted}.")]
        if not matches or matches[0] == 0:
            raise UserError(f"strategy.split: no cut can be before {wanted}; {suggest(wanted, names[1:])}")
        cuts.append(matches[0])
    if len(cuts) != stages - 1 or cuts != sorted(set(cuts)):
        raise UserError(
            f"strategy.split={list(split)}: {stages} stages need {stages - 1} cuts, in the order of the blocks"
        )
    return cuts


class _Partition(NamedTuple):
    """Consecutive stages: the cost of the most expensive one, which `min` compares first, and the cuts between them."""

    cost: float
    cuts: list[int]


def _balanced_cuts(blocks: Sequence[Block], stages: int) -> list[int]:
    """Return the cuts that minimize the cost of the most expensive stage.

    The algorithm is dynamic programming (the linear partition problem). `best[end]` is the best partition of
    `blocks[:end]` into `count` stages. The last of these stages is `blocks[start:end]` for some `start`, and the stages
    before it form the best partition of `blocks[:start]` into `count - 1` stages.
    """
    best = {end: _Partition(_stage_cost(blocks, 0, end), []) for end in range(1, len(blocks) + 1)}
    for count in range(2, stages + 1):
        previous, best = best, {}
        for end in range(count, len(blocks) + 1):
            candidates = []
            for start in range(count - 1, end):
                cost = max(previous[start].cost, _stage_cost(blocks, start, end))
                candidates.append(_Partition(cost, [*previous[start].cuts, start]))
            best[end] = min(candidates)
    return best[len(blocks)].cuts


def _stage_cost(blocks: Sequence[Block], start: int, end: int) -> float:
    """Return the cost of the stage `blocks[start:end]` in FLOPs; bytes sent count as FLOPs."""
    stage = blocks[start:end]
    if not any(block.num_parameters for block in stage):
        return math.inf  # every stage must have parameters to train
    sent = stage[-1].bytes_sent if end < len(blocks) else 0
    return sum(block.flops for block in stage) + sent * _FLOPS_PER_BYTE
