"""FSDP: each rank holds its shard, clips by the full norm, and refuses invalid options."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from src.run.experiment import assemble
from src.utils.errors import UserError
from tests.support.comparison import TOLERANCE, check_resumed, distances
from tests.support.experiments import SHORT_RUN
from tests.support.interruption import die
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit

FSDP = ["strategy=fsdp", "trainer.devices=2"]


def shard_bytes(cfg: Any) -> tuple[int, int, int]:
    """Return bytes: this rank's weights, its moments, and the weights of the full network or stage."""
    trainer, module, data = assemble(cfg)
    trainer.fit(module, datamodule=data)
    weights = [weight for weight in module.parameters() if isinstance(weight, DTensor)]
    assert len(weights) == len(list(module.parameters()))
    moments = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    moment_bytes = sum(moment.to_local().nbytes for moment in moments if isinstance(moment, DTensor))
    return (
        sum(weight.to_local().nbytes for weight in weights),
        moment_bytes,
        sum(4 * weight.numel() for weight in weights),
    )


@pytest.mark.parametrize(("strategy", "devices", "shards"), [("fsdp", 4, 4), ("hsdp", 4, 2), ("hybrid", 4, 2)])
def test_each_rank_holds_its_shard(
    strategy: str, devices: int, shards: int, pool: Pool, small: list[str], folder: Path
) -> None:
    task = ["model.width=8", "data.batch_size=16", "trainer.max_steps=2", "trainer.limit_val_batches=0"]
    plain = ["callbacks.best=null", "callbacks.checkpoint=null"]
    sharded = ["strategy.data_parallel=fsdp"] if strategy == "hybrid" else []
    cfg = compose(folder, *small, *task, *plain, f"strategy={strategy}", f"trainer.devices={devices}", *sharded)
    for weights, moments, full in pool.run(devices, shard_bytes, cfg):
        assert weights == moments
        assert weights == pytest.approx(full / shards, rel=0.1)


def test_clips_by_the_norm_of_all_shards(alone: Callable[..., Record], short_run: Callable[..., list[Record]]) -> None:
    clip = "trainer.gradient_clip_val=0.5"
    assert alone(clip).losses != alone().losses
    for record in short_run(*FSDP, clip):
        assert max(distances(record, alone(clip))) < TOLERANCE


def test_an_optimizer_without_state_resumes(
    alone: Callable[..., Record], pool: Pool, small: list[str], folder: Path
) -> None:
    stateless = ["model.norm=group", "optimizer.momentum=0", "optimizer.nesterov=false"]
    task = [*small, *SHORT_RUN, *stateless, *FSDP]
    pool.run(2, die, compose(folder, *task), "on_train_batch_end", 3)
    check_resumed(pool.run(2, fit, compose(folder, *task, f"ckpt_path={folder}/died.ckpt")), alone(*stateless), done=3)


@pytest.mark.parametrize("dtypes", [["strategy.param_dtype=bfloat16"], ["trainer.precision=bf16-mixed"]], ids=" ".join)
def test_half_precision_stays_near_full_precision(
    dtypes: list[str], alone: Callable[..., Record], short_run: Callable[..., list[Record]]
) -> None:
    task = ["trainer.precision=32-true", "optimizer.lr=0.001"]
    reference = alone(*task)
    for record in short_run(*task, *FSDP, *dtypes):
        assert record.losses == pytest.approx(reference.losses, rel=0.1)
        assert record.losses != pytest.approx(reference.losses, rel=1e-5)
        assert record.metrics["val/loss"] == pytest.approx(reference.metrics["val/loss"], rel=0.2)


def test_refuses_invalid_options(pool: Pool, small: list[str], folder: Path) -> None:
    with pytest.raises(RankFailed, match=r"strategy.replicas=3 does not divide the 2 processes"):
        pool.run(2, fit, compose(folder, *small, *FSDP, "strategy.replicas=3"))
    with pytest.raises(UserError, match=r"strategy.param_dtype=half-ish is no data type"):
        assemble(compose(folder, *small, *FSDP, "strategy.param_dtype=half-ish"))
