"""FSDP clips by the full norm, resumes without moments, trains in half precision, and refuses invalid options."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from src.engine import Batch
from src.engine.run.experiment import assemble
from src.engine.utils.errors import UserError
from src.models.classifier import ImageClassifier
from tests.support.comparison import TOLERANCE, check_resumed, distances
from tests.support.experiments import SHORT_RUN
from tests.support.interruption import die
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit

FSDP = ["strategy=fsdp", "trainer.devices=2"]


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


class Penalized(ImageClassifier):
    """A penalty on the weights in the loss."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return super().loss(outputs, batch) + sum(weight.abs().sum() for weight in self.net.parameters())


def test_refuses_a_loss_of_the_weights(pool: Pool, small: list[str], folder: Path) -> None:
    penalized = "module._target_=tests.engine.parallel.test_fsdp.Penalized"
    with pytest.raises(RankFailed, match="training_step reads weights outside"):
        pool.run(2, fit, compose(folder, *small, "model=mlp", *FSDP, penalized))


@pytest.mark.parametrize("strategy", [FSDP, ["strategy=hybrid", "strategy.data_parallel=fsdp"], ["strategy=ddp_spawn"]])
def test_refuses_hooks_of_parameters(strategy: list[str], small: list[str], folder: Path) -> None:
    hooked = "model._target_=tests.support.networks.Unused"
    with pytest.raises(UserError, match="lose the hook of the parameter net"):
        assemble(compose(folder, *small, hooked, *strategy))
