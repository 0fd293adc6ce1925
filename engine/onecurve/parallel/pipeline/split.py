"""Split a network into pipeline stages: before named blocks, or such that the stages have similar cost."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

from onecurve.errors import UserError, suggest
from onecurve.parallel.pipeline.blocks import Block


def cut(blocks: Sequence[Block], stages: int, split: str | Sequence[str]) -> list[list[Block]]:
    """Return the blocks of each stage; raise a UserError if the network has no such cuts.

    `split` is `auto`, which minimizes the FLOPs of the largest stage, or the names of the blocks before which to cut.
    """
    trained = sum(block.is_trained for block in blocks)
    if stages > trained:
        raise UserError(
            f"strategy=pipeline: {stages} stages, but `model` has {trained} blocks with parameters to train: lower "
            "trainer.devices (interleaved and zero-bubble schedules make two stages per process)"
        )
    names = [split] if isinstance(split, str) else split
    cuts = _balanced_cuts(blocks, stages) if split == "auto" else _named_cuts(blocks, stages, names)
    bounds = list(pairwise([0, *cuts, len(blocks)]))
    if not all(_is_stage(blocks, start, end) for start, end in bounds):
        raise UserError(
            f"strategy.split={split} gives no cut into {stages} stages that leaves each a parameter to train and sends "
            "only floating-point tensors with a row for each sample: cut elsewhere, lower trainer.devices, "
            "or use strategy=ddp or fsdp"
        )
    parts = [list(blocks[start:end]) for start, end in bounds]
    _check_unshared(parts)
    return parts


def _is_stage(blocks: Sequence[Block], start: int, end: int) -> bool:
    can_end = end == len(blocks) or blocks[end - 1].can_end_stage
    return can_end and any(block.is_trained for block in blocks[start:end])


def _named_cuts(blocks: Sequence[Block], stages: int, split: Sequence[str]) -> list[int]:
    """Return the indices of the blocks before which to cut.

    A name can also belong to a sequence of blocks; the cut is then before its first block.
    """
    names = [block.name for block in blocks]
    cuts = []
    for wanted in map(str, split):  # the blocks of an nn.Sequential have numbers
        matches = [index for index, name in enumerate(names) if name == wanted or name.startswith(f"{wanted}.")]
        if not matches or matches[0] == 0:
            raise UserError(f"strategy.split: no cut can be before {wanted}; {suggest(wanted, names[1:])}")
        cuts.append(matches[0])
    if len(cuts) != stages - 1 or cuts != sorted(set(cuts)):
        raise UserError(
            f"strategy.split={list(split)}: {stages} stages need {stages - 1} cuts, in the order of the blocks"
        )
    return cuts


def _balanced_cuts(blocks: Sequence[Block], stages: int) -> list[int]:
    """Return the cuts that minimize the FLOPs of the largest stage, by dynamic programming."""

    def cost(start: int, end: int) -> float:
        return sum(block.flops for block in blocks[start:end]) if _is_stage(blocks, start, end) else math.inf

    @cache
    def best(count: int, end: int) -> tuple[float, list[int]]:
        """Return the cost of the largest of `count` stages from the first `end` blocks, and the cuts between them."""
        if count == 1:
            return cost(0, end), []
        candidates = []
        for start in range(count - 1, end):  # the first block of the last stage
            largest, cuts = best(count - 1, start)
            candidates.append((max(largest, cost(start, end)), [*cuts, start]))
        return min(candidates)

    return best(stages, len(blocks))[1]


def _check_unshared(stages: Sequence[Sequence[Block]]) -> None:
    """Check that no parameter belongs to two stages, where it would get two gradients, and no running statistics."""
    owners: dict[int, tuple[int, str]] = {}  # stage and name of each tensor
    for number, blocks in enumerate(stages):
        for name, tensor in (pair for block in blocks for pair in block.tensors.items()):
            owner, other = owners.setdefault(id(tensor), (number, name))
            if owner != number:
                raise UserError(
                    f"strategy=pipeline: {other} and {name} are one tensor, of two stages: set strategy.split such "
                    "that one stage has both, or use strategy=ddp"
                )


def format_table(stages: Sequence[Sequence[Block]], stage_to_rank: Sequence[int]) -> list[str]:
    """Return a table of the stages as lines: rank, parameters, fraction of the FLOPs, and MiB sent per micro-batch."""
    total = sum(block.flops for blocks in stages for block in blocks) or 1
    lines = ["  stage  rank  parameters  FLOPs  sends       blocks"]
    for number, (blocks, rank) in enumerate(zip(stages, stage_to_rank, strict=True)):
        num_parameters = sum(parameter.numel() for block in blocks for parameter in block.parameters.values())
        fraction = sum(block.flops for block in blocks) / total
        sent = sum(node.meta["value"].nbytes for node in blocks[-1].outputs) / 2**20
        names = blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} ... {blocks[-1].name}"
        lines.append(f"  {number:<5}  {rank:<4}  {num_parameters:<10,}  {fraction:<5.0%}  {sent:6.2f} MiB  {names}")
    *inner, _ = [block for blocks in stages for block in blocks]
    if uncut := [block.name for block in inner if not block.can_end_stage]:
        lines.append(
            f"  no cut after {', '.join(uncut)}: not all that passes there is floating-point, a row per sample"
        )
    return lines
