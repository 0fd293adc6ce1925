"""The promise: the same run under every strategy and world size is the same run, in float64 to 1e-9."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from omegaconf import DictConfig
from torch.nn.parallel import DistributedDataParallel

from src.data.sampler import TrainingBatches
from src.strategies.schedules import SCHEDULES, kind_of
from src.strategies.sync_batchnorm import GlobalBatchNorm
from tests.pool import Pool
from tests.runs import STRATEGIES, Record, compose, drives_all_devices, fit, relative, spawned

TOLERANCE = 1e-9
EXPERIMENTS: dict[str, list[str]] = {
    "sgd": [],
    "adamw": ["optimizer=adamw", "optimizer.lr=0.01"],
    "accumulate": ["trainer.accumulate_grad_batches=2"],
    "muon": [
        "model=airbench",
        "~model.width",
        "model.widths=[8,16,16]",
        "optimizer=muon",
        "optimizer.unit_filters=true",
        "optimizer.whitening_share=0.5",
        "callbacks=[default,whitening]",
        "callbacks.whitening.bias_share=0.5",
        "data.augment.flip=alternating",
    ],
    "deep": ["model=wide_resnet", "model.width=1", "model.depth=16", "data.batch_size=16"],  # blocks for eight stages
}
World = tuple[str, int, list[str]]  # strategy, processes, options
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
FEW_BLOCKS = 4  # stages that the default model's blocks make


def _experiment(schedule: str, devices: int) -> str:
    return "deep" if kind_of(schedule).stages_per_rank * devices > FEW_BLOCKS else "sgd"


RUNS = [
    *[(experiment, world) for experiment in ("sgd", "adamw", "accumulate") for world in WORLDS],
    *[("sgd", world) for world in OPTIONS],
    *[("accumulate", world) for world in OPTIONS],
    *[("muon", world) for world in ("ddp x2", "fsdp x2", "hsdp x4", *MUON_OPTIONS)],
    *[(_experiment(world.partition(", ")[2], devices), world) for world, (_, devices, _) in SCHEDULED.items()],
]


def distances(run: Record, reference: Record) -> tuple[float, float]:
    """The worst relative difference of any step's loss, and of any final weight or buffer."""
    losses = max(abs(a - b) / abs(b) for a, b in zip(run.losses, reference.losses, strict=True))
    weights = max(relative(tensor, reference.final[name]) for name, tensor in run.final.items())  # a stage's, or all
    return losses, weights


@pytest.fixture(scope="module")
def alone(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Record]:
    """The single process's run, which accumulates the micro-batches that a pipeline makes of each batch."""

    @functools.cache
    def run(experiment: str, micro_batches: int) -> Record:
        cfg = compose(tmp_path_factory.mktemp("single"), *small, "experiment=parity", *EXPERIMENTS[experiment])
        cfg.trainer.accumulate_grad_batches *= micro_batches
        return fit(cfg)

    return run


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_reference_is_worth_comparing_with(
    experiment: str, micro_batches: int, alone: Callable[[str, int], Record]
) -> None:
    reference = alone(experiment, micro_batches)
    assert len(reference.losses) == 20
    assert len({tuple(sorted(batch)) for batch in reference.indices}) == len(reference.indices)
    matrices = {name: tensor for name, tensor in reference.initial.items() if tensor.ndim > 1 and name not in FROZEN}
    moved = [relative(reference.final[name], tensor) for name, tensor in matrices.items()]
    assert min(moved) > 0.01
    assert all(tensor.dtype == torch.float64 for tensor in reference.final.values() if tensor.is_floating_point())


def _marked(experiment: str, world: str) -> Any:
    """Lightning takes ten seconds and more to spawn processes, which then do what those of ddp do."""
    spawned_again = "spawn" in world and (experiment != "sgd" or world in OPTIONS)
    marks = [pytest.mark.slow] if spawned_again else []
    return pytest.param(experiment, world, marks=marks, id=f"{experiment}, {world}")


@pytest.mark.parametrize(("experiment", "world"), [_marked(*run) for run in RUNS])
def test_agrees_with_single_process(
    experiment: str,
    world: str,
    alone: Callable[[str, int], Record],
    pool: Pool,
    small: list[str],
    folder: Path,
    record_property: Callable[[str, object], None],
) -> None:
    strategy, devices, options = (WORLDS | OPTIONS | SCHEDULED)[world]
    chosen = [*EXPERIMENTS[experiment], f"strategy={strategy}", f"trainer.devices={devices}", *options]
    cfg = compose(folder, *small, "experiment=parity", *chosen)
    if drives_all_devices(cfg):
        fit(cfg)
        records = spawned(folder, devices)
    else:
        records = pool.run(devices, fit, cfg)
    reference = alone(experiment, cfg.strategy.get("microbatches", 1))
    assert {name for record in records for name in record.final} == set(reference.final)
    found = [distances(record, reference) for record in records]
    losses, weights = (max(values) for values in zip(*found, strict=True))
    record_property("parity", (world, experiment, losses, weights))  # for `make parity`
    assert losses < TOLERANCE
    assert weights < TOLERANCE
    for record in records:
        same = [
            (mine, other.final[name]) for other in records for name, mine in record.final.items() if name in other.final
        ]
        assert all(torch.equal(mine, theirs) for mine, theirs in same), "a rank has another replica"


def test_three_processes_agree_too(pool: Pool, small: list[str], folder: Path) -> None:
    """Their share of the batch is no power of two, so that rounding is not on our side."""
    task = [*small, "experiment=parity", "data.batch_size=33"]
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
def test_notices(
    sabotage: Callable[[DictConfig, int], list[L.Callback]], pool: Pool, small: list[str], folder: Path
) -> None:
    reference = fit(compose(folder / "single", *small, "experiment=parity"))
    cfg = compose(folder / "ddp", *small, "experiment=parity", "strategy=ddp", "trainer.devices=2")
    for record in pool.run(2, _broken_fit, cfg, sabotage):
        assert max(distances(record, reference)) > 1000 * TOLERANCE
