"""FSDP clips by the full norm, resumes without moments, trains in half precision, and refuses invalid options."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.comparison import check_resumed
from tests.support.experiments import SHORT_RUN
from tests.support.interruption import die
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit

FSDP = ["strategy=fsdp", "trainer.devices=2"]


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
