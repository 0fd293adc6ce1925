"""Solutions of the exercises of chapter 8."""

from collections.abc import Sequence

Passes = list[tuple[str, int]]


def idle_fraction(stages: Sequence[Passes], forward: float, backward: float) -> float:
    seconds = {"forward": forward, "backward": backward}
    ends: dict[tuple[int, str, int], float] = {}
    clocks, done = [0.0] * len(stages), [0] * len(stages)
    while sum(done) < sum(map(len, stages)):
        for stage, passes in enumerate(stages):
            if done[stage] == len(passes):
                continue
            kind, index = passes[done[stage]]
            before = stage - 1 if kind == "forward" else stage + 1
            if before in range(len(stages)) and (before, kind, index) not in ends:
                continue  # this stage waits
            start = max(clocks[stage], ends.get((before, kind, index), 0.0))
            clocks[stage] = ends[stage, kind, index] = start + seconds[kind]
            done[stage] += 1
    busy = sum(seconds[kind] for passes in stages for kind, _ in passes)
    return 1 - busy / (len(stages) * max(clocks))


def best_cuts(costs: Sequence[float], stages: int) -> list[list[float]]:
    if stages == 1:
        return [list(costs)]
    candidates = [[list(costs[:cut]), *best_cuts(costs[cut:], stages - 1)] for cut in range(1, len(costs) - stages + 2)]
    return min(candidates, key=lambda cuts: max(map(sum, cuts)))
