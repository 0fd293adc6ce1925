"""Each rank holds only its share of the weights and of the optimizer's state."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor

from onecurve.run.experiment import assemble
from tests.support.experiments import SHORT_RUN
from tests.support.pool import Pool
from tests.support.runs import compose


def held_bytes(cfg: Any) -> tuple[int, int, int]:
    """Return bytes: this rank's weights, its moments, and the weights of the full network."""
    trainer, module, data = assemble(cfg)
    full = sum_bytes(module.parameters())
    trainer.fit(module, datamodule=data)
    optimizer = trainer.optimizers[0]
    state = getattr(optimizer, "optim", optimizer).state  # ZeroRedundancyOptimizer wraps that of the rank
    moments = [value for tensors in state.values() for value in tensors.values()]
    return sum_bytes(module.parameters()), sum_bytes(moments), full


def sum_bytes(tensors: Iterable[Tensor]) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("strategy", "devices", "options", "weight_copies", "moment_copies"),
    [
        ("ddp", 2, ["strategy.shard_optimizer=true"], 2, 1),
        ("fsdp", 4, [], 1, 1),
        ("hybrid", 4, ["strategy.data_parallel=fsdp"], 1, 1),
        ("pipeline", 4, [], 1, 1),
        pytest.param("hsdp", 4, [], 2, 2, marks=pytest.mark.slow),
    ],
)
def test_each_rank_holds_its_share(
    strategy: str,
    devices: int,
    options: list[str],
    weight_copies: int,
    moment_copies: int,
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    """SGD has one moment per weight. FSDP pads its shards."""
    quick = ["callbacks=none", "trainer.max_steps=1", "trainer.limit_val_batches=0"]
    world = [f"strategy={strategy}", f"trainer.devices={devices}", *options]
    ranks = pool.run(devices, held_bytes, compose(folder, *small, *SHORT_RUN, *quick, *world))
    weights, moments, full = ([rank[part] for rank in ranks] for part in range(3))
    assert sum(weights) == pytest.approx(weight_copies * full[0], rel=0.1)
    assert sum(moments) == pytest.approx(moment_copies * full[0], rel=0.1)
    assert min(moments) > 0
