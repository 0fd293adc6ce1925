"""The schedules of torch.distributed.pipelining by name, and the assignment of their stages to ranks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed.pipelining as pp
from torch import Tensor

from onecurve.errors import UserError


class ScheduleSpec(NamedTuple):
    """A schedule of torch.distributed.pipelining and its properties.

    Attributes:
        schedule: torch's class.
        stages_per_rank: one or two; with two stages a rank idles less.
        v_shape: whether the second half of the stages is on the ranks in reverse order, which makes a V.
        splits_backward: whether weight gradients are computed in a separate pass.
    """

    schedule: Any
    stages_per_rank: int = 1
    v_shape: bool = False
    splits_backward: bool = False

    def stage_to_rank(self, ranks: int) -> list[int]:
        """Return the rank of each stage, for a pipeline of `ranks` ranks."""
        one_way = list(range(ranks))
        if self.v_shape:
            return one_way + one_way[::-1]
        return one_way * self.stages_per_rank

    def bubble(self, ranks: int, microbatches: int) -> float:
        """Return the least fraction of a step in which the ranks idle, if all passes take as long."""
        passes = microbatches * self.stages_per_rank * (3 if self.splits_backward else 1)
        return (ranks - 1) / (passes + ranks - 1)


SCHEDULES = {
    "gpipe": ScheduleSpec(pp.ScheduleGPipe),
    "1f1b": ScheduleSpec(pp.Schedule1F1B),
    "interleaved_1f1b": ScheduleSpec(pp.ScheduleInterleaved1F1B, stages_per_rank=2),
    "interleaved_zero_bubble": ScheduleSpec(pp.ScheduleInterleavedZeroBubble, stages_per_rank=2, splits_backward=True),
    "zbv_zero_bubble": ScheduleSpec(pp.ScheduleZBVZeroBubble, stages_per_rank=2, v_shape=True, splits_backward=True),
}


def build_schedule(
    name: str, stages: list[pp.PipelineStage], microbatches: int, loss: Callable[[Any, Tensor], Tensor] | None
) -> Any:
    """Build torch's schedule, a key of `SCHEDULES`, for the stages of this rank.

    `loss` maps a tuple of the outputs, and a target, to a weighted sum over samples, so that the gradients of the
    micro-batches add up without scaling. It is None if the schedule is not executed.
    """
    spec = SCHEDULES[name]
    stage_or_stages: Any = stages[0] if spec.stages_per_rank == 1 else stages
    try:
        return spec.schedule(stage_or_stages, microbatches, loss_fn=loss, scale_grads=False)
    except ValueError as error:
        raise UserError(
            f"strategy.schedule={name} with {microbatches} micro-batches: {error} Raise strategy.microbatches (with "
            "bit_exact=true virtual_ranks); gpipe takes any number"
        ) from error
