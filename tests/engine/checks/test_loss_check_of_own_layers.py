"""The check of a loss takes samples as a step does: in the precision of the run, and as many as a queue takes.

A loss over the samples of all ranks, which a step gathers, may be that of one process, and is not refused.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather
from torch.utils.data import TensorDataset

from onecurve.errors import UserError
from onecurve.run.experiment import run_experiment
from tests.support.comparison import TOLERANCE, distances
from tests.support.habits import VectorData, Vectors
from tests.support.pool import Pool, RankFailed
from tests.support.runs import compose, fit, fit_ranks

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
OWN += ["trainer.max_epochs=1", "trainer.log_every_n_steps=1", "+data._target_=tests.support.habits.VectorData"]


def of_class(module: type) -> list[str]:
    return [*OWN, f"+module._target_={__name__}.{module.__name__}"]


class Decorrelating(Vectors):
    """Normalizes by a layer that each step makes, as the loss of Barlow Twins does."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1] = nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        points = nn.BatchNorm1d(3, affine=False)(self.net(batch[0]))
        return (points.T @ points / len(points)).square().sum()


class Queueing(Decorrelating):
    """Compares samples, and keeps them in a queue of whole batches."""

    queue: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(64, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        points = F.normalize(self.net(batch[0]), dim=1)
        assert len(self.queue) % len(points) == 0
        return (points @ points.T).square().mean() + (points @ self.queue.T).mean()


class NoisySamples(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn_like(x[:1]), y


class NoisyData(VectorData):
    def _samples(self, count: int, seed: int) -> TensorDataset:
        return NoisySamples(*super()._samples(count, seed).tensors)


def test_found_with_a_dataset_that_draws(folder: Path) -> None:
    words = [*of_class(Decorrelating), f"data._target_={__name__}.NoisyData", "trainer.accumulate_grad_batches=2"]
    with pytest.raises(UserError, match="does not divide by samples"):
        run_experiment(compose(folder, *words))


@pytest.mark.parametrize("module", [Decorrelating, Queueing])
@pytest.mark.parametrize("precision", ["64-true", "32-true"])
def test_found(module: type, precision: str, folder: Path) -> None:
    words = [*of_class(module), f"trainer.precision={precision}", "trainer.accumulate_grad_batches=2"]
    with pytest.raises(UserError, match="does not divide by samples"):
        run_experiment(compose(folder, *words))


class HalfHead(Vectors):
    """Computes its last layer in bfloat16, which rounds the loss and the gradients of all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3).bfloat16()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.net(batch[0]).bfloat16()).float(), batch[1])


def test_half_precision_of_one_layer_is_no_loss_that_does_not_divide(folder: Path) -> None:
    words = [*of_class(HalfHead), "trainer.precision=32-true", "trainer.accumulate_grad_batches=2"]
    run_experiment(compose(folder, *words, "trainer.max_steps=1"))


class Contrasting(Vectors):
    """Compares its samples with those of all ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        points = F.normalize(self.net(batch[0]), dim=1)
        others = torch.cat(all_gather(points)) if dist.is_initialized() else points
        loss = (points @ others.T).div(0.1).exp().mean(1).log().mean()
        self.log("train/loss", loss, sync_dist=True)
        return loss


def test_a_loss_over_the_samples_of_all_ranks(pool: Pool, folder: Path) -> None:
    words = [*of_class(Contrasting), "trainer.precision=64-true"]
    one = fit(compose(folder / "one", *words))
    for record in fit_ranks(compose(folder / "two", *words, "strategy=ddp", "trainer.devices=2"), pool):
        assert max(distances(record, one)) < TOLERANCE
    exact = [*words, "bit_exact=true", "strategy=ddp", "trainer.devices=2"]
    with pytest.raises(RankFailed, match=r"bit_exact=true computes .* communicates .* whatever trainer.world_size is"):
        fit_ranks(compose(folder / "exact", *exact), pool)
