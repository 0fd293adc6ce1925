"""A training step launches few kernels: a small batch on a GPU takes as long as the launches."""

import pytest

from scripts.dev.benchmarks.launches import count_operations

SMALL = ["data.batch_size=16", "data.source.test_size=20"]


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (
            ["model.width=4", "+optimizer.fused=true", "data.norm_groups=1"],
            {"data": 30, "forward and loss": 50, "optimizer": 2},
        ),
        # Each of eight layers normalizes four groups one by one, unless the network is compiled.
        (
            ["model.width=4", "+optimizer.fused=true"],
            {"data": 30, "forward and loss": 115, "backward": 125, "optimizer": 2},
        ),
        (["experiment=speedrun", "model.widths=[8,8,8]"], {"data": 50, "forward and loss": 60, "optimizer": 85}),
    ],
    ids=["one group", "default", "speedrun"],
)
def test_step_has_few_operations(options: list[str], most: dict[str, int]) -> None:
    counts = {phase: sum(names.values()) for phase, names in count_operations([*options, *SMALL]).items()}
    assert counts.keys() == {"data", "forward and loss", "backward", "optimizer"}
    assert {phase: count for phase, count in counts.items() if count > most.get(phase, 45)} == {}
