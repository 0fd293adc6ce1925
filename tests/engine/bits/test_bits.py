"""With `bit_exact=true` a run is the same on any hardware, to the last bit, in float32 and in bfloat16.

Equal are the text of metrics.csv, all weights and buffers, and the moments of the optimizer. `make test-all` has every
strategy and schedule with every variation of the experiment.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from onecurve.data.layout import BatchLayout, DataParallelInfo, Division
from onecurve.network.tensors import to_local
from onecurve.parallel import gradients
from onecurve.parallel.pipeline.schedules import SCHEDULES
from onecurve.parallel.tree_sum import TreeSum
from onecurve.parallel.virtual_ranks import PassSums
from tests.support.bits import EXACT, check_equal_bits
from tests.support.comparison import TOLERANCE, distances
from tests.support.experiments import EXPERIMENTS, SHORT, VIT
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit, fit_and_test, fit_ranks

WORLDS = {
    "ddp x1": ["strategy=ddp", "trainer.devices=1"],
    "ddp x2": ["strategy=ddp", "trainer.devices=2"],
    "ddp x3": ["strategy=ddp", "trainer.devices=3"],  # 2, 3 and 3 virtual ranks
    "ddp x4": ["strategy=ddp", "trainer.devices=4"],
    "ddp x2, shares 3:1": ["strategy=ddp", "trainer.devices=2", "strategy.shares=[3,1]"],
    "ddp x2, ZeRO-1": ["strategy=ddp", "trainer.devices=2", "strategy.shard_optimizer=true"],
    "ddp_spawn x2": ["strategy=ddp_spawn", "trainer.devices=2"],
    "fsdp x2": ["strategy=fsdp", "trainer.devices=2"],
    "fsdp x4": ["strategy=fsdp", "trainer.devices=4", "strategy.reshard_after_forward=false"],
    "hybrid x4": ["strategy=hybrid", "trainer.devices=4", "strategy.stages=2"],
    **{
        f"pipeline x{devices}, {name}": ["strategy=pipeline", f"trainer.devices={devices}", f"strategy.schedule={name}"]
        for name, spec in SCHEDULES.items()
        for devices in (2, 4)
        if spec.stages_per_rank * devices <= 4  # the blocks of the default network
    },
    "workers": ["data.num_workers=2", "trainer.devices=1"],
    "recomputed": ["module.recompute=blocks", "trainer.devices=1"],
    "recomputed, ddp x2": ["module.recompute=blocks", "strategy=ddp", "trainer.devices=2"],
    "recomputed, pipeline x2": ["module.recompute=blocks", "strategy=pipeline", "trainer.devices=2"],
}
VARIATIONS = {
    **{name: EXPERIMENTS[name] for name in ("sgd", "adamw", "mixed", "muon")},
    "bf16": ["trainer.precision=bf16-mixed"],
    "clipped, averaged": ["trainer.gradient_clip_val=0.5", "callbacks=[default,ema,gradients,evaluation]"],
    "transformer": ["~model.width", *VIT[:1], "+model.width=8", *VIT[2:], "model.dropout=0.2", "optimizer=adamw"],
}
QUICK = [
    # Muon: tests/engine/parity and tests/engine/faults/test_travel.py.
    ("sgd", "workers"),
    ("adamw", "ddp x2, ZeRO-1"),
    ("mixed", "ddp x3"),
    ("bf16", "pipeline x2, zbv_zero_bubble"),
    *[("clipped, averaged", world) for world in ("fsdp x2", "hybrid x4")],
    ("transformer", "recomputed, pipeline x2"),
]
SIX_STEPS = [*SHORT, "trainer.max_steps=6"]  # the last one is in the second epoch
ALL = [(variation, world) for variation in VARIATIONS for world in WORLDS]
ROWS = [
    *[pytest.param(*row, SIX_STEPS, id=", ".join(row)) for row in QUICK],
    *[pytest.param(*row, [], id=f"20 steps: {', '.join(row)}", marks=pytest.mark.slow) for row in ALL],
]


@pytest.fixture(scope="session")
def one_process(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Record]:
    """Return a function that trains and tests on one process, once for each choice of options."""

    @functools.cache
    def run(*options: str) -> Record:
        return fit_and_test(compose(tmp_path_factory.mktemp("exact"), *small, *EXACT, *options))

    return run


@pytest.mark.parametrize(("variation", "world", "length"), ROWS)
def test_has_the_bits_of_one_process(
    variation: str,
    world: str,
    length: list[str],
    one_process: Callable[..., Record],
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    options = [*length, *VARIATIONS[variation]]
    if "fsdp" in world:  # whose filters are contiguous
        options.append("module.channels_last=false")
    records = fit_ranks(compose(folder, *small, *EXACT, *options, *WORLDS[world]), pool, test=True)
    check_equal_bits(records, one_process(*options))


def _add_as_they_arrive(self: TreeSum, tensors: list[Tensor], first: int, count: int = 1) -> None:
    """Add to one sum, in the order of the passes of a process and of the processes."""
    if self.nodes:
        before = self.nodes.popitem()[1]
        if tensors:
            torch._foreach_add_(tensors, before)
    self.nodes[first, count] = tensors


def _keep_buffers(self: PassSums) -> None:
    """Let a pass begin with the buffers that the pass before it has left."""


def _add_shards(tensors: list[Tensor], device: torch.device, group: Any = None) -> Tensor:
    """Return a norm whose squares are added within each process first."""
    squares = torch.stack([to_local(tensor).square().sum() for tensor in tensors]).sum()
    if group is not None:
        torch.distributed.all_reduce(squares, group=group)
    return squares.sqrt()


def _shift_block(self: Division, batch_size: int) -> list[BatchLayout]:
    """Give each process but the first the samples of the virtual ranks after its own."""
    own, count = self.own_virtual_ranks, self.virtual_ranks
    return [BatchLayout(batch_size, DataParallelInfo(count, (v + (own[0] > 0)) % count)) for v in own]


CLIPPED = ["trainer.gradient_clip_val=0.05"]
SABOTAGES: dict[str, tuple[Any, str, Any, list[str]]] = {
    "sums in the order of arrival": (TreeSum, "add", _add_as_they_arrive, WORLDS["ddp x3"]),
    "buffers of the pass before": (PassSums, "copy_buffers", _keep_buffers, WORLDS["ddp x2"]),
    "a norm that processes add": (gradients, "order_free_norm", _add_shards, [*CLIPPED, *WORLDS["pipeline x2, 1f1b"]]),
    "a block shifted by one": (Division, "layouts", _shift_block, WORLDS["ddp x2"]),
}


def _sabotaged_fit(cfg: DictConfig, name: str) -> Record:
    owner, attribute, replacement, _ = SABOTAGES[name]
    with patch.object(owner, attribute, replacement):
        return fit(cfg)


@pytest.mark.parametrize("name", SABOTAGES)
def test_finds_what_depends_on_the_processes(name: str, pool: Pool, small: list[str], folder: Path) -> None:
    task = [*small, *EXACT, *SHORT, "trainer.limit_val_batches=0", *SABOTAGES[name][3]]
    devices = next(int(word[-1]) for word in task if word.startswith("trainer.devices="))
    alone = ["strategy=auto", "trainer.devices=1"]
    words = [word for word in task if not word.startswith(("strategy", "trainer.devices"))]
    reference = _sabotaged_fit(compose(folder / "alone", *words, *alone), name)
    records = pool.run(devices, _sabotaged_fit, compose(folder / "several", *task), name)
    with pytest.raises(AssertionError):
        check_equal_bits(records, reference)


@pytest.mark.parametrize(
    "variation", ["transformer", *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "mixed"))]
)
def test_one_by_one_has_the_curve_of_together(
    variation: str, alone: Callable[..., Record], small: list[str], folder: Path
) -> None:
    """The masks of dropout are those of the samples in both ways of computing; the sums differ in their last bits."""
    options = [*VARIATIONS[variation], "virtual_ranks=8"]
    one_by_one = fit_and_test(compose(folder, *small, "experiment=parity", *SHORT, *options, "bit_exact=true"))
    together = alone(*options)
    assert 0 < max(distances(one_by_one, together)) < TOLERANCE
