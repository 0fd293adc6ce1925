"""A run is the same under every strategy and world size, to 1e-9 in float64.

Each strategy in conf/strategy makes a short run, but those that are DDP here. `make test-all` adds all schedules and
world sizes, with the 20 steps of the shipped experiment.
"""

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel

from onecurve.data.layout import BatchLayout
from onecurve.data.rank_batches import TrainingBatches
from onecurve.parallel.batch_norm import GroupedBatchNorm
from onecurve.parallel.ddp import DDP
from onecurve.parallel.pipeline.schedules import SCHEDULES
from tests.support.comparison import TOLERANCE, check_replicas, distances
from tests.support.experiments import EXPERIMENTS, SHORT, SHORT_RUN, SHORT_STEPS
from tests.support.pool import Pool, RankFailed
from tests.support.runs import STRATEGIES, Record, compose, fit, fit_ranks

World = tuple[str, int, list[str]]  # strategy, processes, options


def _microbatches(strategy: str, count: int) -> list[str]:
    """Return the options of a pipeline with so many micro-batches per accumulated batch; 1F1B needs one per stage."""
    return [f"strategy.microbatches={count}", "strategy.schedule=gpipe"] if strategy in ("pipeline", "hybrid") else []


ON_FOUR = ("hsdp", "hybrid")  # on two processes they equal fsdp and pipeline
WORLDS: dict[str, World] = {
    f"{strategy} x{devices}": (strategy, devices, []) for strategy in STRATEGIES for devices in (2, 4)
}
OPTIONS: dict[str, World] = {
    "ddp x1": ("ddp", 1, []),
    "ddp x2, ZeRO-1": ("ddp", 2, ["strategy.shard_optimizer=true"]),
    "ddp x4, ZeRO-1": ("ddp", 4, ["strategy.shard_optimizer=true"]),
    "ddp_spawn x2, ZeRO-1": ("ddp_spawn", 2, ["strategy.shard_optimizer=true"]),
    "hybrid x4 of fsdp": ("hybrid", 4, ["strategy.data_parallel=fsdp"]),
    "hybrid x4 of fsdp, zbv": ("hybrid", 4, ["strategy.data_parallel=fsdp", "strategy.schedule=zbv_zero_bubble"]),
}
SCHEDULED: dict[str, World] = {
    f"pipeline x{devices}, {name}": ("pipeline", devices, [f"strategy.schedule={name}"])
    for name in SCHEDULES
    for devices in (2, 4)
} | {
    f"pipeline x2, {name}, 2 micro-batches": (
        "pipeline",
        2,
        [f"strategy.schedule={name}", "strategy.microbatches=2"],
    )
    for name in SCHEDULES
    if not SCHEDULES[name].v_shape  # which needs four
}
UNEVEN: dict[str, World] = {  # ranks with different numbers of samples
    "ddp x3": ("ddp", 3, []),
    "ddp x2, shares 3:1": ("ddp", 2, ["strategy.shares=[3,1]"]),
    "ddp x3, accumulate 2": ("ddp", 3, ["trainer.accumulate_grad_batches=2"]),
    "fsdp x3, shares 5:2:1": ("fsdp", 3, ["strategy.shares=[5,2,1]"]),
    "hybrid x4, shares 3:1": ("hybrid", 4, ["strategy.shares=[3,1]", "strategy.microbatches=2"]),
}
ACCUMULATED: dict[str, World] = {
    f"{name}, accumulate {count}": (
        strategy,
        devices,
        [f"trainer.accumulate_grad_batches={count}", *_microbatches(strategy, 4 // count)],
    )
    for name, (strategy, devices, _) in (WORLDS | {"ddp x1": ("ddp", 1, [])}).items()
    for count in (2, 4)
}
MUON_OPTIONS = ("ddp x2, ZeRO-1", "hybrid x4 of fsdp", "pipeline x2, 1f1b", "pipeline x2, zbv_zero_bubble")
FROZEN = ("net.layer1.whitening.weight",)
FEW_BLOCKS = 4  # the most stages for the default model's blocks


def _experiment(schedule: str, devices: int) -> str:
    return "deep" if SCHEDULES[schedule].stages_per_rank * devices > FEW_BLOCKS else "sgd"


AS_DDP = ("auto", "best")  # on several processes; tests/engine/parallel/test_ddp.py and tests/engine/extras/plan
QUICK = [
    *[("sgd", f"{name} x{4 if name in ON_FOUR else 2}") for name in STRATEGIES if name not in AS_DDP],
    # AdamW: tests/engine/faults/test_travel.py. Each schedule, shares and accumulation: test_hardware.py.
    *[("muon", world) for world in ("ddp x2, ZeRO-1", "pipeline x2, zbv_zero_bubble")],
    ("mixed", "ddp x3"),
    ("one group", "ddp x2"),
]
ALL = [
    *[(experiment, world) for experiment in ("sgd", "adamw") for world in WORLDS],
    ("adamw", "ddp x4, ZeRO-1"),
    *[("sgd", world) for world in [*OPTIONS, *ACCUMULATED, *UNEVEN]],
    *[("mixed", world) for world in UNEVEN],
    *[("one group", world) for world in ("ddp x4", "fsdp x4", "hsdp x4", "ddp x3", "fsdp x3, shares 5:2:1")],
    *[("muon", world) for world in ("ddp x2", "fsdp x2", "hsdp x4", *MUON_OPTIONS)],
    *[
        (_experiment(options[0].partition("=")[2], devices), world)
        for world, (_, devices, options) in SCHEDULED.items()
    ],
]
SHIPPED: list[str] = []  # the shipped experiment of 20 steps, unchanged
ROWS = [
    *[pytest.param(*row, SHORT, id=f"{row[0]}, {row[1]}") for row in QUICK],
    *[pytest.param(*row, SHIPPED, id=f"20 steps of {row[0]}, {row[1]}", marks=pytest.mark.slow) for row in ALL],
]


@pytest.fixture(scope="session")
def single_process(
    alone: Callable[..., Record], small: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, list[str]], Record]:
    """Return a function that trains a single process: the one reference of all worlds."""

    @functools.cache
    def shipped(experiment: str) -> Record:
        return fit(compose(tmp_path_factory.mktemp("single"), *small, "experiment=parity", *EXPERIMENTS[experiment]))

    return lambda experiment, length: alone(*EXPERIMENTS[experiment]) if length else shipped(experiment)


@pytest.mark.parametrize(
    ("experiment", "length", "steps"),
    [
        *[(name, SHORT, SHORT_STEPS) for name in dict(QUICK)],
        *[pytest.param(name, SHIPPED, 20, marks=pytest.mark.slow) for name in EXPERIMENTS],
    ],
)
def test_reference_run_changes_its_weights(
    experiment: str,
    length: list[str],
    steps: int,
    single_process: Callable[[str, list[str]], Record],
) -> None:
    """The run crosses an epoch boundary, repeats no batch, is in float64, and moves each weight by more than 1 %."""
    reference = single_process(experiment, length)
    assert len(reference.losses) == steps
    assert len({tuple(sorted(batch)) for batch in reference.indices}) == len(reference.indices)
    first_epoch = {index for batch in reference.indices for index in batch}
    assert sum(map(len, reference.indices)) > len(first_epoch), "some samples occur in a second epoch"
    matrices = {name: tensor for name, tensor in reference.initial.items() if tensor.ndim > 1 and name not in FROZEN}
    moved = [float((reference.final[name] - tensor).norm() / tensor.norm()) for name, tensor in matrices.items()]
    assert min(moved) > 0.01
    assert all(tensor.dtype == torch.float64 for tensor in reference.final.values() if tensor.is_floating_point())


@pytest.mark.parametrize(("experiment", "world", "length"), ROWS)
def test_agrees_with_single_process(
    experiment: str,
    world: str,
    length: list[str],
    single_process: Callable[[str, list[str]], Record],
    pool: Pool,
    small: list[str],
    folder: Path,
    record_property: Callable[[str, object], None],
) -> None:
    strategy, devices, options = (WORLDS | OPTIONS | SCHEDULED | UNEVEN | ACCUMULATED)[world]
    chosen = [*EXPERIMENTS[experiment], f"strategy={strategy}", f"trainer.devices={devices}", *options]
    cfg = compose(folder, *small, "experiment=parity", *length, *chosen)
    records = fit_ranks(cfg, pool)
    reference = single_process(experiment, length)
    assert {name for record in records for name in record.final} == set(reference.final)
    losses, weights = (
        max(values) for values in zip(*(distances(record, reference) for record in records), strict=True)
    )
    record_property("parity", (world, experiment, losses, weights))  # for `make parity`
    assert losses < TOLERANCE
    assert weights < TOLERANCE
    check_replicas(records)


def _break_epochs(cfg: DictConfig, rank: int) -> Any:
    return patch.object(TrainingBatches, "set_epoch", lambda self, epoch: None)


def _break_groups(cfg: DictConfig, rank: int) -> Any:
    """Let each rank form groups of its own samples, in another order."""
    positions = BatchLayout.positions.func
    return patch.object(BatchLayout, "positions", property(lambda self: positions(self).sort(1).values))


def _break_running_statistics(cfg: DictConfig, rank: int) -> Any:
    """Let the running statistics decay with each micro-batch."""
    return patch.object(
        GroupedBatchNorm, "is_first_pass", property(lambda self: True, lambda self, value: None), create=True
    )


def _break_averaging(cfg: DictConfig, rank: int) -> Any:
    def stop_averaging(self: DDP) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        self.model.require_backward_grad_sync = False

    return patch.object(DDP, "on_train_start", stop_averaging)


def _break_one_seed(cfg: DictConfig, rank: int) -> Any:
    cfg.data.seed += rank
    return nullcontext()


def _break_shares(cfg: DictConfig, rank: int) -> Any:
    """Let a rank weigh its samples by their number on this rank, which is off by one."""
    return patch.object(BatchLayout, "mean_samples_per_batch", property(lambda self: self.samples_per_batch))


def _broken_fit(cfg: DictConfig, sabotage: Callable[[DictConfig, int], Any]) -> Record:
    with sabotage(cfg, int(os.environ["RANK"])):
        return fit(cfg)


@pytest.mark.parametrize(
    ("sabotage", "devices", "options"),
    [
        (_break_epochs, 2, []),
        (_break_groups, 2, []),
        (_break_running_statistics, 2, ["trainer.accumulate_grad_batches=2"]),
        (_break_shares, 3, []),
    ],
)
def test_detects_broken_runs(
    sabotage: Callable[[DictConfig, int], Any],
    devices: int,
    options: list[str],
    alone: Callable[..., Record],
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    reference = alone()
    world = ["strategy=ddp", f"trainer.devices={devices}", *options]
    for record in pool.run(devices, _broken_fit, compose(folder, *small, *SHORT_RUN, *world), sabotage):
        assert max(distances(record, reference)) > 1000 * TOLERANCE


def test_refuses_gradients_that_ranks_do_not_average(pool: Pool, small: list[str], folder: Path) -> None:
    cfg = compose(folder, *small, *SHORT_RUN, "strategy=ddp", "trainer.devices=2")
    with pytest.raises(RankFailed, match=r"net\.head\.2\.bias differs between the ranks"):
        pool.run(2, _broken_fit, cfg, _break_averaging)


def test_refuses_the_split_of_another_seed(pool: Pool, small: list[str], folder: Path) -> None:
    cfg = compose(folder, *small, *SHORT_RUN, "strategy=ddp", "trainer.devices=2")
    with pytest.raises(RankFailed, match="the ranks have different training data"):
        pool.run(2, _broken_fit, cfg, _break_one_seed)
