"""FSDP clips by the full norm, resumes without moments, trains in half precision, and refuses invalid options."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F

from onecurve.errors import UserError
from onecurve.parallel.compatibility import check_can_train
from onecurve.parallel.ddp import DDP
from onecurve.parallel.fsdp import FSDP
from onecurve.parallel.pipeline.pipeline import Pipeline
from onecurve.parallel.sharded_state import prepare_to_shard
from tests.support.comparison import check_resumed
from tests.support.experiments import SHORT_RUN
from tests.support.interruption import die
from tests.support.modules import Unshardable
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit

TWO_RANKS = ["strategy=fsdp", "trainer.devices=2"]


def test_an_optimizer_without_state_resumes(
    alone: Callable[..., Record], pool: Pool, small: list[str], folder: Path
) -> None:
    stateless = ["model.norm=group", "optimizer.momentum=0", "optimizer.nesterov=false"]
    task = [*small, *SHORT_RUN, *stateless, *TWO_RANKS]
    pool.run(2, die, compose(folder, *task), "on_train_batch_end", 3)
    check_resumed(pool.run(2, fit, compose(folder, *task, f"ckpt_path={folder}/died.ckpt")), alone(*stateless), done=3)


@pytest.mark.parametrize(
    "dtypes",
    [["strategy.param_dtype=bfloat16"], pytest.param(["trainer.precision=bf16-mixed"], marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_half_precision_stays_near_full_precision(
    dtypes: list[str], alone: Callable[..., Record], short_run: Callable[..., list[Record]]
) -> None:
    task = ["trainer.precision=32-true", "optimizer.lr=0.001"]
    reference = alone(*task)
    for record in short_run(*task, *TWO_RANKS, *dtypes):
        assert record.losses == pytest.approx(reference.losses, rel=0.1)
        assert record.losses != pytest.approx(reference.losses, rel=1e-5)
        assert record.metrics["val/loss"] == pytest.approx(reference.metrics["val/loss"], rel=0.2)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("scalar", "FSDP cannot shard the scalar net.logit_scale: give it a dense weight of one dimension"),
        ("transposed", None),
    ],
)
@pytest.mark.parametrize(
    "strategy", [FSDP(), FSDP(replicas=2), Pipeline(data_parallel="fsdp")], ids=["fsdp", "hsdp", "hybrid"]
)
def test_weights_that_fsdp_does_not_take(strategy: Any, kind: str, message: str | None) -> None:
    module = Unshardable(kind)
    layer: Any = module.net[0]
    module.loss = F.cross_entropy  # type: ignore[assignment]
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_can_train(strategy, module)
        prepare_to_shard(layer)
    assert message or layer.weight.is_contiguous()
    check_can_train(DDP(), module)
