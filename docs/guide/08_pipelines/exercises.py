"""Exercises of chapter 8. Replace each `raise`, then run `python -m docs.guide.check 8`."""

import importlib
from collections.abc import Callable, Sequence
from itertools import combinations

Passes = list[tuple[str, int]]


def idle_fraction(stages: Sequence[Passes], forward: float, backward: float) -> float:
    """Return the fraction of a step in which a stage idles, averaged over the stages.

    Args:
        stages: the passes of each stage in the order in which it runs them, such as `("forward", 0)`.
        forward: the seconds of a forward pass of a micro-batch on a stage; it waits for that of the stage before.
        backward: the seconds of a backward pass; it waits for that of the stage after. Sending takes no time.
    """
    raise NotImplementedError("Keep the end of each pass, and a clock for each stage.")


def best_cuts(costs: Sequence[float], stages: int) -> list[list[float]]:
    """Cut the costs of a network's blocks into consecutive stages, so that the most expensive stage costs least."""
    raise NotImplementedError("The slowest stage sets the pace. Try all cuts; there are few.")


def check_idle_fraction(solution: Callable[[Sequence[Passes], float, float], float]) -> None:
    script = importlib.import_module("docs.guide.08_pipelines.train")
    two = [script.passes("1f1b", stage, 4) for stage in range(2)]
    for name, stages, forward, backward, expected in [
        ("1f1b", two, 1, 2, 1 / 5),
        ("one micro-batch", four_stages(1), 1, 2, 3 / 4),
        ("gpipe on four stages", four_stages(8), 1, 2, 3 / 11),
        ("gpipe with equal passes", four_stages(4), 1, 1, 3 / 7),
    ]:
        got = solution(stages, forward, backward)
        assert abs(got - expected) < 1e-9, f"{name}: got {got}, expected {expected}"


def four_stages(micro_batches: int) -> list[Passes]:
    """Return the passes of GPipe, of which all stages have the same."""
    return [[(kind, index) for kind in ("forward", "backward") for index in range(micro_batches)]] * 4


def check_best_cuts(solution: Callable[[Sequence[float], int], list[list[float]]]) -> None:
    for costs, stages in [([13824, 18432, 8192, 320], 2), ([5, 1, 1, 1, 5], 3), ([3, 1, 4, 1, 5, 9, 2, 6], 4)]:
        got = solution(costs, stages)
        assert [bool(stage) for stage in got] == [True] * stages, f"{stages} stages with a block each, but got {got}"
        assert [cost for stage in got for cost in stage] == list(costs), f"{got} is not {costs} in their order"
        least = min(
            max(sum(costs[start:end]) for start, end in zip((0, *cuts), (*cuts, len(costs)), strict=True))
            for cuts in combinations(range(1, len(costs)), stages - 1)
        )
        assert max(map(sum, got)) == least, f"{got}: the most expensive stage could cost {least}"
