"""Solutions of the exercises of chapter 9."""


def groups_of(rank: int, ranks: int, stages: int) -> tuple[list[int], list[int]]:
    first = rank // stages * stages
    return list(range(first, first + stages)), list(range(rank % stages, ranks, stages))


def bytes_between_hosts(
    table: list[list[int]], ranks_per_host: int, gradient_bytes: float, activation_bytes: float
) -> float:
    total, replicas = 0.0, len(table)
    for row, pipeline in enumerate(table):
        next_row = table[(row + 1) % replicas]
        for stage, rank in enumerate(pipeline):
            if rank // ranks_per_host != next_row[stage] // ranks_per_host:
                total += 2 * (replicas - 1) / replicas * gradient_bytes
            if stage > 0 and rank // ranks_per_host != pipeline[stage - 1] // ranks_per_host:
                total += 2 * activation_bytes
    return total
