"""The simulated passes of the pipeline schedules: their order, their times, and the bubble."""

from collections import Counter
from itertools import pairwise

import pytest

from scripts.dev.pictures.simulation import Action, Pass, bubble, order_of_passes, simulate, simulate_order
from src.engine.parallel.pipeline.schedules import SCHEDULES
from src.engine.utils.errors import UserError

SIZES = [(1, 2), (2, 2), (2, 8), (4, 4), (4, 8), (4, 12)]  # ranks, micro-batches
ALL = [(schedule, *size) for schedule in SCHEDULES for size in SIZES]


def simulated_bubble(schedule: str, ranks: int, microbatches: int) -> float:
    return bubble(simulate(schedule, ranks, microbatches))


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)])
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_bubble_is_the_papers(schedule: str, stages_per_rank: int, ranks: int, microbatches: int) -> None:
    expected = (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)
    assert simulated_bubble(schedule, ranks, microbatches) == expected


@pytest.mark.parametrize(
    ("schedule", "microbatches", "percent"),
    [
        ("zbv_zero_bubble", 4, 20.0),
        ("zbv_zero_bubble", 8, 5.9),
        ("interleaved_zero_bubble", 4, 11.1),
        ("interleaved_zero_bubble", 8, 5.9),
    ],
)
def test_bubble_of_zero_bubble_schedules(schedule: str, microbatches: int, percent: float) -> None:
    assert round(100 * simulated_bubble(schedule, 4, microbatches), 1) == percent


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 7), (4, 8), (8, 32)])
def test_zbv_idles_only_because_the_ranks_wait_for_each_other(ranks: int, microbatches: int) -> None:
    """Between its first and its last pass no rank idles, so without that wait the bubble is zero."""
    for passes in simulate("zbv_zero_bubble", ranks, microbatches):
        assert passes[-1].end - passes[0].start == 6 * microbatches
    assert simulated_bubble("zbv_zero_bubble", ranks, microbatches) == (ranks - 1) / (6 * microbatches + ranks - 1)


@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), ALL)
def test_each_pass_runs_once_and_in_turn(schedule: str, ranks: int, microbatches: int) -> None:
    spec = SCHEDULES[schedule]
    stage_to_rank, kinds = spec.stage_to_rank(ranks), "FIW" if spec.splits_backward else "FB"
    expected = [(stage, k, kind) for stage in range(len(stage_to_rank)) for k in range(microbatches) for kind in kinds]
    timeline = simulate(schedule, ranks, microbatches)
    assert Counter(entry[:3] for passes in timeline for entry in passes) == Counter(expected)
    for rank, passes in enumerate(timeline):
        assert {stage_to_rank[entry.stage] for entry in passes} == {rank}
        assert all(before.end <= after.start for before, after in pairwise(passes))
        assert all(entry.end - entry.start == (2 if entry.kind == "B" else 1) for entry in passes)


@pytest.mark.parametrize(("schedule", "ranks", "microbatches"), ALL)
def test_passes_wait_for_their_inputs(schedule: str, ranks: int, microbatches: int) -> None:
    entries = [entry for passes in simulate(schedule, ranks, microbatches) for entry in passes]
    forward = {entry[:2]: entry for entry in entries if entry.kind == "F"}
    backward = {entry[:2]: entry for entry in entries if entry.kind in "BI"}

    def follows(later: Pass, earlier: Pass | None) -> bool:
        return earlier is None or later.start >= earlier.end

    for (stage, k), entry in forward.items():
        assert follows(entry, forward.get((stage - 1, k)))
        assert follows(backward[stage, k], entry)
        assert follows(backward[stage, k], backward.get((stage + 1, k)))
    for entry in entries:
        assert entry.kind != "W" or follows(entry, backward[entry[:2]])


def test_refuses_what_the_schedule_does_not_support() -> None:
    with pytest.raises(UserError, match=r"1f1b with strategy.microbatches=2"):
        simulate("1f1b", 4, 2)
    with pytest.raises(UserError, match="is no schedule"):
        simulate("2f2b", 4, 8)


def test_replicas_of_a_pipeline_run_at_the_same_time() -> None:
    order = order_of_passes("1f1b", 2, 4)
    assert simulate_order([*order, *order]) == 2 * simulate("1f1b", 2, 4)


def test_incomplete_order_is_refused() -> None:
    with pytest.raises(ValueError, match="not complete"):
        simulate_order([[Action(1, 0, "F")]])
