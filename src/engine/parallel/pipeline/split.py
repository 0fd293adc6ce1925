"""Split a network into pipeline stages: before named blocks, or such that the stages have similar cost."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

from src.engine.parallel.pipeline.blocks import Block
from src.engine.utils.errors import UserError, suggest

_TOLERANCE = 1.02  # factor on the FLOPs of the largest stage that smaller messages may cost


def cut(blocks: Sequence[Block], stages: int, split: str | Sequence[str]) -> list[list[Block]]:
    """Return the blocks of each stage.

    Args:
        blocks: all blocks of the network, in order.
        stages: number of stages.
        split: `auto`, which minimizes the FLOPs of the largest stage, and within 2 % of that the largest message; or
            the names of the blocks before which to cut.

    Raises:
        UserError: if there are more stages than blocks with parameters, a block does not exist, the number of cuts is
            wrong, a stage has no parameters, would send anything but activations, or shares parameters with another.
    """
    trained = sum(block.is_trained for block in blocks)
    if stages > trained:
        raise UserError(
            f"strategy=pipeline: {stages} stages, but `model` has {trained} blocks with parameters to train: lower "
            "trainer.devices (interleaved and zero-bubble schedules make two stages per process)"
        )
    cuts = _balanced_cuts(blocks, stages) if isinstance(split, str) else _named_cuts(blocks, stages, split)
    parts = [list(blocks[start:end]) for start, end in pairwise([0, *cuts, len(blocks)])]
    for part in parts:
        if not any(block.is_trained for block in part):
            raise UserError(f"strategy.split: a stage of {part[0].name} alone trains no parameters; cut elsewhere")
        if part is not parts[-1] and math.isinf(part[-1].bytes_sent):
            raise UserError(
                f"strategy.split: after {part[-1].name} the network passes on more than activations; cut elsewhere"
            )
    _check_unshared(parts)
    return parts


def _check_unshared(stages: Sequence[Sequence[Block]]) -> None:
    """Check that no parameter belongs to two stages, where it would get two gradients, and no running statistics."""
    for first, second in combinations(stages, 2):
        names = {id(tensor): name for block in first for name, tensor in block.tensors.items()}
        for block in second:
            for name, tensor in block.tensors.items():
                if id(tensor) in names:
                    raise UserError(
                        f"strategy=pipeline: {names[id(tensor)]} and {name} are one tensor, of two stages: "
                        "set strategy.split such that one stage has both, or use strategy=ddp"
                    )


def format_table(stages: Sequence[Sequence[Block]], stage_to_rank: Sequence[int]) -> list[str]:
    """Return a table of the stages as lines: rank, parameters, fraction of the FLOPs, and MiB sent per micro-batch."""
    total = sum(block.flops for blocks in stages for block in blocks) or 1
    lines = ["  stage  rank  parameters  FLOPs  sends       blocks"]
    for number, (blocks, rank) in enumerate(zip(stages, stage_to_rank, strict=True)):
        num_parameters = sum(block.num_parameters for block in blocks)
        fraction = sum(block.flops for block in blocks) / total
        sent = blocks[-1].bytes_sent / 2**20 if number < len(stages) - 1 else 0.0
        names = blocks[0].name if len(blocks) == 1 else f"{blocks[0].name} ... {blocks[-1].name}"
        lines.append(f"  {number:<5}  {rank:<4}  {num_parameters:<10,}  {fraction:<5.0%}  {sent:6.2f} MiB  {names}")
    return lines


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
    """Return the cuts of `split=auto`.

    Sending has no weight against computing, since devices and links differ, and messages overlap with passes.
    """

    def flops(start: int, end: int) -> float:
        stage = blocks[start:end]
        is_stage = any(block.is_trained for block in stage) and math.isfinite(sent(start, end))
        return sum(block.flops for block in stage) if is_stage else math.inf

    def sent(start: int, end: int) -> float:
        return blocks[end - 1].bytes_sent if end < len(blocks) else 0.0

    limit = _TOLERANCE * _partition(len(blocks), stages, flops).cost
    if math.isinf(limit):
        raise UserError(
            f"strategy=pipeline: no cut into {stages} stages leaves each a parameter to train, and sends only tensors "
            "with a row for each sample: lower trainer.devices, or use strategy=ddp or fsdp"
        )
    smallest = _partition(len(blocks), stages, lambda *part: sent(*part) if flops(*part) <= limit else math.inf).cost
    return _partition(len(blocks), stages, lambda *part: flops(*part) if sent(*part) <= smallest else math.inf).cuts


def _partition(length: int, stages: int, cost: Callable[[int, int], float]) -> _Partition:
    """Return the partition of `length` blocks that minimizes the cost of the most expensive stage.

    The algorithm is dynamic programming (the linear partition problem). `best[end]` is the best partition of the first
    `end` blocks into `count` stages. The last of these has the blocks from `start` on for some `start`, and the stages
    before it form the best partition of the first `start` blocks into `count - 1` stages.
    """
    best = {end: _Partition(cost(0, end), []) for end in range(1, length + 1)}
    for count in range(2, stages + 1):
        previous, best = best, {}
        for end in range(count, length + 1):
            candidates = []
            for start in range(count - 1, end):
                larger = max(previous[start].cost, cost(start, end))
                candidates.append(_Partition(larger, [*previous[start].cuts, start]))
            best[end] = min(candidates)
    return best[length]
