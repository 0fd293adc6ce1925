"""A run is the same under every strategy and world size, to 1e-9 in float64.

Each strategy in conf/strategy makes a short run. `make test-all` adds all world sizes, with the 20 steps of the shipped
experiment.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from omegaconf import DictConfig
from src.strategies.sync_batchnorm import GlobalBatchNorm
from torch.nn.parallel import DistributedDataParallel

from src.data.sampler import TrainingBatches
from src.strategies.pipeline.schedules import SCHEDULES, schedule_spec
from tests.support.comparison import TOLERANCE, check_replicas, distances
from tests.support.experiments import EXPERIMENTS, SHORT, SHORT_STEPS
from tests.support.pool import Pool
from tests.support.runs import STRATEGIES, Record, compose, fit, fit_ranks

World = tuple[str, int, list[str]]  # strategy, processes, options
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
}
MUON_OPTIONS = ("ddp x2, ZeRO-1", "hybrid x4 of fsdp", "pipeline x2, 1f1b", "pipeline x2, zbv_zero_bubble")
FROZEN = ("net.layer1.whitening.weight",)
FEW_BLOCKS = 4  # the most stages for the default model's blocks


def _experiment(schedule: str, devices: int) -> str:
    return "deep" if schedule_spec(schedule).stages_per_rank * devices > FEW_BLOCKS else "sgd"


QUICK = [
    *[("sgd", f"{strategy} x{4 if strategy in ON_FOUR else 2}") for strategy in STRATEGIES],
    *[("adamw", world) for world in ("ddp x4, ZeRO-1", "fsdp x2", "pipeline x2")],
    *[("accumulate", world) for world in ("ddp x2", "fsdp x4", "pipeline x2", "hybrid x4 of fsdp, zbv")],
    *[("muon", world) for world in ("ddp x2, ZeRO-1", "fsdp x2", "pipeline x2, zbv_zero_bubble")],
    *[(_experiment(schedule, 2), f"pipeline x2, {schedule}") for schedule in SCHEDULES],
]
ALL = [
    *[(experiment, world) for experiment in ("sgd", "adamw", "accumulate") for world in WORLDS],
    *[("sgd", world) for world in OPTIONS],
    *[("accumulate", world) for world in OPTIONS],
    *[("muon", world) for world in ("ddp x2", "fsdp x2", "hsdp x4", *MUON_OPTIONS)],
    *[(_experiment(world.partition(", ")[2], devices), world) for world, (_, devices, _) in SCHEDULED.items()],
]
SHIPPED: list[str] = []  # the shipped experiment of 20 steps, unchanged
ROWS = [
    *[pytest.param(*row, SHORT, id=f"{row[0]}, {row[1]}") for row in dict.fromkeys(QUICK)],
    *[pytest.param(*row, SHIPPED, id=f"20 steps of {row[0]}, {row[1]}", marks=pytest.mark.slow) for row in ALL],
]


@pytest.fixture(scope="session")
def single_process(
    small: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, int, list[str]], Record]:
    """Return a function that trains a single process, which accumulates a pipeline's micro-batches."""

    @functools.cache
    def run(experiment: str, micro_batches: int, length: tuple[str, ...]) -> Record:
        folder = tmp_path_factory.mktemp("single")
        cfg = compose(folder, *small, "experiment=parity", *length, *EXPERIMENTS[experiment])
        cfg.trainer.accumulate_grad_batches *= micro_batches
        return fit(cfg)

    return lambda experiment, micro_batches, length: run(experiment, micro_batches, tuple(length))


@pytest.mark.parametrize(
    ("length", "steps"),
    [(SHORT, SHORT_STEPS), pytest.param(SHIPPED, 20, marks=pytest.mark.slow)],
    ids=["short", "20 steps"],
)
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    "experiment", [pytest.param(name, marks=[pytest.mark.slow] if name == "deep" else []) for name in EXPERIMENTS]
)
def test_reference_run_changes_its_weights(
    experiment: str,
    micro_batches: int,
    length: list[str],
    steps: int,
    single_process: Callable[[str, int, list[str]], Record],
) -> None:
    """The run crosses an epoch boundary, repeats no batch, is in float64, and moves each weight by more than 1 %."""
    reference = single_process(experiment, micro_batches, length)
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
    single_process: Callable[[str, int, list[str]], Record],
    pool: Pool,
    small: list[str],
    folder: Path,
    record_property: Callable[[str, object], None],
) -> None:
    strategy, devices, options = (WORLDS | OPTIONS | SCHEDULED)[world]
    chosen = [*EXPERIMENTS[experiment], f"strategy={strategy}", f"trainer.devices={devices}", *options]
    cfg = compose(folder, *small, "experiment=parity", *length, *chosen)
    records = fit_ranks(cfg, pool)
    reference = single_process(experiment, cfg.strategy.get("microbatches", 1), length)
    assert {name for record in records for name in record.final} == set(reference.final)
    losses, weights = (
        max(values) for values in zip(*(distances(record, reference) for record in records), strict=True)
    )
    record_property("parity", (world, experiment, losses, weights))  # for `make parity`
    assert losses < TOLERANCE
    assert weights < TOLERANCE
    check_replicas(records)


@pytest.mark.parametrize("length", [SHORT, pytest.param(SHIPPED, marks=pytest.mark.slow)], ids=["short", "20 steps"])
def test_three_processes_agree(length: list[str], pool: Pool, small: list[str], folder: Path) -> None:
    """A third of the batch is no power of two, so the ranks round differently."""
    task = [*small, "experiment=parity", *length, "data.batch_size=33"]
    reference = fit(compose(folder / "single", *task))
    for record in pool.run(3, fit, compose(folder, *task, "strategy=ddp", "trainer.devices=3")):
        assert max(distances(record, reference)) < TOLERANCE


class _NoAveraging(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(trainer.model, DistributedDataParallel)
        trainer.model.require_backward_grad_sync = False


def _break_epochs(cfg: DictConfig, rank: int) -> list[L.Callback]:
    TrainingBatches.set_epoch = lambda self, epoch: None  # type: ignore[method-assign]
    return []


def _break_batch_norm(cfg: DictConfig, rank: int) -> list[L.Callback]:
    GlobalBatchNorm.apply = lambda self, model: model  # type: ignore[method-assign]
    return []


def _break_averaging(cfg: DictConfig, rank: int) -> list[L.Callback]:
    return [_NoAveraging()]


def _break_one_seed(cfg: DictConfig, rank: int) -> list[L.Callback]:
    cfg.data.seed += rank
    return []


def _broken_fit(cfg: DictConfig, sabotage: Callable[[DictConfig, int], list[L.Callback]]) -> Record:
    import os

    saved = TrainingBatches.set_epoch, GlobalBatchNorm.apply
    try:
        return fit(cfg, *sabotage(cfg, int(os.environ["RANK"])))
    finally:
        TrainingBatches.set_epoch, GlobalBatchNorm.apply = saved  # type: ignore[method-assign]


@pytest.mark.parametrize("sabotage", [_break_epochs, _break_batch_norm, _break_averaging, _break_one_seed])
def test_detects_broken_runs(
    sabotage: Callable[[DictConfig, int], list[L.Callback]],
    single_process: Callable[[str, int, list[str]], Record],
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    reference = single_process("sgd", 1, SHORT)
    cfg = compose(folder, *small, "experiment=parity", *SHORT, "strategy=ddp", "trainer.devices=2")
    for record in pool.run(2, _broken_fit, cfg, sabotage):
        assert max(distances(record, reference)) > 1000 * TOLERANCE
