"""Modules of other projects get pairs (images, targets), and the same promises."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from src.run.experiment import run
from tests.support.comparison import check_resumed
from tests.support.experiments import SHORT
from tests.support.interruption import run_on_ranks
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit


class Plain(L.LightningModule):
    """A module without knowledge of this project, whose `loss` is another than that of its classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * 32 * 32, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10)
        )
        self.loss = nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        image, target = batch
        loss = self.loss(self.net(image), target)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).softmax(1)

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        image, target = batch
        logits = self.net(image)
        metrics = {"loss": F.cross_entropy(logits, target), "acc": (logits.argmax(1) == target).to(logits.dtype).mean()}
        self.log_dict(
            {f"{stage}/{name}": value for name, value in metrics.items()}, batch_size=len(image), sync_dist=True
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.named_parameters(), lr=0.05)


def plain(folder: Path, small: list[str], *overrides: str) -> DictConfig:
    cfg = compose(folder, *small, "experiment=parity", *SHORT, "data.val_fraction=0.13", *overrides)
    cfg.module = OmegaConf.create({"_target_": "tests.data.test_pairs.Plain"})
    return cfg


def fit_and_test(cfg: DictConfig) -> Record:
    return fit(cfg, test=True)


def test_trains_and_evaluates_alike_on_two_processes(pool: Pool, small: list[str], folder: Path) -> None:
    """Dropout depends on the samples, and 13 validation images on two ranks leave padding, which is dropped."""
    alone = fit_and_test(plain(folder / "one", small))
    assert len(alone.losses) == 8
    records = run_on_ranks(pool, 2, fit_and_test, plain(folder, small, "strategy=ddp", "trainer.devices=2"))
    check_resumed(records, alone, 0)
    for record in records:
        for name in ("val/loss", "val/acc", "test/loss", "test/acc"):
            assert record.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-6)


def test_predicts(images: Path, pool: Pool, small: list[str], folder: Path) -> None:
    """Five images on two ranks leave padding, which the table omits."""
    options = ["fit=false", "test=false", f"predict={images}/test/class 0"]
    run(plain(folder / "one", small, *options))
    run_on_ranks(pool, 2, run, plain(folder, small, *options, "strategy=ddp", "trainer.devices=2"))
    table = (folder / "predictions.csv").read_text()
    assert table.count("\n") == 6
    assert table == (folder / "one" / "predictions.csv").read_text()


def test_refuses_an_evaluation_without_samples_before_training(pool: Pool, small: list[str], folder: Path) -> None:
    cfg: Any = plain(folder, small, "strategy=ddp", "trainer.devices=2", "data.source.test_size=1")
    with pytest.raises(RankFailed, match="the 1 images of `test` leave a batch of one of the processes empty"):
        pool.run(2, fit, cfg)


@pytest.mark.parametrize("world", [["trainer.devices=3"], ["trainer.devices=2", "strategy.shares=[3,1]"]], ids=str)
def test_refuses_ranks_with_different_numbers_of_samples(
    world: list[str], pool: Pool, small: list[str], folder: Path
) -> None:
    """The module averages over the batch of its rank, and the strategy over the ranks."""
    cfg: Any = plain(folder, small, "strategy=ddp", *world)
    with pytest.raises(RankFailed, match="Plain averages over the batch of its own process"):
        pool.run(cfg.trainer.devices, fit, cfg)


@pytest.mark.parametrize("world", [["trainer.devices=3"], ["trainer.devices=2", "strategy.shares=[3,1]"]], ids=str)
def test_evaluates_on_ranks_with_different_numbers_of_samples(
    world: list[str], pool: Pool, small: list[str], folder: Path
) -> None:
    alone = run(plain(folder / "one", small, "fit=false"))
    cfg: Any = plain(folder, small, "fit=false", "strategy=ddp", *world)
    for metrics in pool.run(cfg.trainer.devices, run, cfg):
        for name in ("test/loss", "test/acc"):
            assert metrics[name] == pytest.approx(alone[name], rel=1e-6)
