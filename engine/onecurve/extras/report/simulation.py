"""Simulation of a pipeline schedule: when each rank runs which pass, and the bubble between the passes.

The step ends when all ranks are done, because the optimizer step waits for the gradients of all.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

from onecurve.parallel.pipeline.schedules import SCHEDULES, build_schedule

_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


class Action(NamedTuple):
    """A pass: `F` forward, `B` full backward, `I` gradients of the inputs only, `W` gradients of the weights only."""

    stage: int
    microbatch: int
    kind: str


class Pass(NamedTuple):
    """An action with its start and end since the start of the step, in seconds or units of a forward pass."""

    stage: int
    microbatch: int
    kind: str
    start: float
    end: float


def order_of_passes(schedule: str, ranks: int, microbatches: int) -> list[list[Action]]:
    """Return what each rank of a pipeline executes in a step, in that order."""
    spec = SCHEDULES[schedule]
    num_stages = spec.stages_per_rank * ranks
    stages: Any = [
        SimpleNamespace(group_size=ranks, group_rank=0, num_stages=num_stages, stage_index=k, submod=nn.Identity())
        for k in range(spec.stages_per_rank)
    ]
    built = build_schedule(schedule, stages, microbatches, loss=None)
    if spec.stages_per_rank == 1:
        # These schedules do not execute their list, and that of 1F1B numbers the micro-batches of the last rank from
        # one (`Schedule1F1B._get_pipeline_order` of torch 2.13).
        ahead = [microbatches if schedule == "gpipe" else ranks - rank for rank in range(ranks)]
        return [_forward_ahead(rank, microbatches, ahead[rank]) for rank in range(ranks)]
    order = [filter(None, built.pipeline_order[rank]) for rank in range(ranks)]
    return [[Action(a.stage_index, a.microbatch_index, a.computation_type.value) for a in actions] for actions in order]


def _forward_ahead(stage: int, microbatches: int, ahead: int) -> list[Action]:
    """Return the passes of a stage that starts with `ahead` forward passes, and then alternates with backward ones."""
    actions = [Action(stage, k, "F") for k in range(ahead)]
    for k in range(microbatches):
        actions.append(Action(stage, k, "B"))
        if k + ahead < microbatches:
            actions.append(Action(stage, k + ahead, "F"))
    return actions


def simulate(
    schedule: str,
    ranks: int,
    microbatches: int,
    duration: Callable[[Action], float] = lambda action: _UNITS[action.kind],
    delay: Callable[[int, int], float] = lambda sender, receiver: 0.0,
) -> list[list[Pass]]:
    """Return the passes of each rank in a step, with their times.

    Args:
        duration: of a pass; by default all stages cost the same, and a full backward pass takes two units of time.
        delay: from the end of a pass of a stage until another stage has its result.
    """
    order = order_of_passes(schedule, ranks, microbatches)
    waiting = [deque(actions) for actions in order]
    last_stage = max(action.stage for actions in order for action in actions)
    timeline: list[list[Pass]] = [[] for _ in waiting]
    ends: dict[Action, float] = {}  # when a result is there
    while any(waiting):
        remaining = sum(map(len, waiting))
        for passes, actions in zip(timeline, waiting, strict=True):
            needed = _needed(actions[0], last_stage) if actions else []
            if not actions or any(action not in ends for action in needed):
                continue
            action = actions.popleft()
            rank_is_free = passes[-1].end if passes else 0.0
            start = max([rank_is_free, *(ends[other] + delay(other.stage, action.stage) for other in needed)])
            passes.append(Pass(*action, start, start + duration(action)))
            if action.kind == "B":  # others wait for the gradients of the inputs
                action = action._replace(kind="I")
            ends[action] = passes[-1].end
        if sum(map(len, waiting)) == remaining:
            raise ValueError("passes wait for others that do not exist")
    return timeline


def _needed(action: Action, last_stage: int) -> list[Action]:
    """Return the actions whose results an action needs."""
    stage, microbatch, kind = action
    if kind == "F":
        return [Action(stage - 1, microbatch, "F")] if stage else []
    if kind == "W":
        return [Action(stage, microbatch, "I")]
    own_forward = Action(stage, microbatch, "F")
    return [own_forward] if stage == last_stage else [own_forward, Action(stage + 1, microbatch, "I")]


def duration(timeline: Collection[Sequence[Pass]]) -> float:
    """Return the end of a step, from the passes of each rank."""
    return max(entry.end for passes in timeline for entry in passes)


def bubble(timeline: Collection[Sequence[Pass]]) -> float:
    """Return the fraction of a step in which the ranks idle on average, from the passes of each rank."""
    total = len(timeline) * duration(timeline)
    busy = sum(entry.end - entry.start for passes in timeline for entry in passes)
    return (total - busy) / total if total else 0.0
