"""The simulated passes of the pipeline schedules: their order, their times, and the bubble of docs/strategies.md."""

from collections import Counter
from itertools import pairwise

import pytest

from onecurve.extras.report.simulation import bubble, simulate
from onecurve.parallel.pipeline.schedules import SCHEDULES

SIZES = [(1, 2), (2, 2), (2, 8), (4, 4), (4, 8), (4, 12)]  # ranks, micro-batches
ALL = [(schedule, *size) for schedule in SCHEDULES for size in SIZES]


@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), [*ALL, ("zbv_zero_bubble", 4, 7)])
def test_bubble_is_the_papers(schedule: str, ranks: int, microbatches: int) -> None:
    simulated, least = bubble(simulate(schedule, ranks, microbatches)), SCHEDULES[schedule].bubble(ranks, microbatches)
    if schedule == "zbv_zero_bubble" and 1 < microbatches <= 2 * ranks - 2:
        assert simulated > least
    else:
        assert simulated == least


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 7), (8, 32)])
def test_zbv_idles_only_because_the_ranks_wait_for_each_other(ranks: int, microbatches: int) -> None:
    """Between its first and its last pass no rank idles, so without that wait the bubble is zero."""
    for passes in simulate("zbv_zero_bubble", ranks, microbatches):
        assert passes[-1].end - passes[0].start == 6 * microbatches


@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), ALL)
def test_each_pass_runs_once_and_waits_for_its_inputs(schedule: str, ranks: int, microbatches: int) -> None:
    spec = SCHEDULES[schedule]
    stage_to_rank, kinds = spec.stage_to_rank(ranks), "FIW" if spec.splits_backward else "FB"
    timeline = simulate(schedule, ranks, microbatches)
    expected = [(stage, k, kind) for stage in range(len(stage_to_rank)) for k in range(microbatches) for kind in kinds]
    assert Counter(entry[:3] for passes in timeline for entry in passes) == Counter(expected)
    for rank, passes in enumerate(timeline):
        assert {stage_to_rank[entry.stage] for entry in passes} == {rank}
        assert all(before.end <= after.start for before, after in pairwise(passes))
    entries = {entry[:3]: entry for passes in timeline for entry in passes}
    for (stage, k, kind), entry in entries.items():
        if kind == "F":
            inputs = [(stage - 1, k, "F")]
        elif kind == "W":
            inputs = [(stage, k, "I")]
        else:
            inputs = [(stage, k, "F"), (stage + 1, k, kind)]
        assert all(entry.start >= entries[each].end for each in inputs if each in entries)
