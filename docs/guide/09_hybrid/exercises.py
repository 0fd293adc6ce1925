"""Exercises of chapter 9. Replace each `raise`, then run `python -m docs.guide.check 9`."""

from collections.abc import Callable


def groups_of(rank: int, ranks: int, stages: int) -> tuple[list[int], list[int]]:
    """Return the ranks of this rank's pipeline, and the ranks that average gradients with it.

    Consecutive ranks form a pipeline: with 4 ranks and 2 stages, rank 1 is in [0, 1], and averages with [1, 3].
    """
    raise NotImplementedError("Which row and which column of the table is this rank in?")


def bytes_between_hosts(
    table: list[list[int]], ranks_per_host: int, gradient_bytes: float, activation_bytes: float
) -> float:
    """Return the bytes that ranks send to ranks on other hosts in one optimizer step.

    Args:
        table: a row of ranks per replica, a column per stage.
        ranks_per_host: the first host has ranks 0, 1, ... up to this number, and so on.
        gradient_bytes: those of the gradients of one stage. The ranks of a column average them around a ring in the
            order of the rows: each sends 2(N-1)/N of these bytes to the next one.
        activation_bytes: what one stage of one replica sends to the next stage per step; as much comes back.
    """
    raise NotImplementedError("Go through the pairs of neighbors in each row, and in the ring of each column.")


def check_groups_of(solution: Callable[[int, int, int], tuple[list[int], list[int]]]) -> None:
    for case, expected in [
        ((1, 4, 2), ([0, 1], [1, 3])),
        ((5, 8, 4), ([4, 5, 6, 7], [1, 5])),
        ((5, 8, 2), ([4, 5], [1, 3, 5, 7])),
        ((2, 3, 1), ([2], [0, 1, 2])),
    ]:
        got = solution(*case)
        assert tuple(map(list, got)) == expected, f"{case}: got {got}, expected {expected}"


def check_bytes_between_hosts(solution: Callable[[list[list[int]], int, float, float], float]) -> None:
    for table, ranks_per_host, expected in [
        ([[0, 1], [2, 3]], 2, 4 * 7.0),  # a replica per host: gradients cross
        ([[0, 2], [1, 3]], 2, 4 * 0.25),  # a stage per host: activations cross
        ([[0, 1, 2, 3], [4, 5, 6, 7]], 2, 8 * 7.0 + 4 * 0.25),
        ([[0], [1], [2], [3]], 2, 2 * 1.5 * 7.0),
        ([[0, 1, 2, 3]], 4, 0.0),
    ]:
        got = solution(table, ranks_per_host, 7.0, 0.25)
        assert abs(got - expected) < 1e-9, f"{table}, {ranks_per_host} per host: got {got}, expected {expected}"
