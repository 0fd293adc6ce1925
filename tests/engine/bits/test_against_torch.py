"""The run of V virtual ranks is that of torch's DistributedDataParallel on V processes, written by hand."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from src.models.resnet9 import resnet9
from tests.support.pool import Pool
from tests.support.runs import compose, fit_ranks

RANKS, BATCH, STEPS = 4, 32, 9  # two epochs of four steps, and one step


class Recurrent(nn.Module):
    """A recurrent network over the rows of images, with batch normalization of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm, self.head = (
            nn.LSTM(96, 16, num_layers=2, batch_first=True),
            nn.BatchNorm1d(16),
            nn.Linear(16, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        states, _ = self.lstm(images.transpose(1, 2).flatten(2))
        return self.head(self.norm(states[:, -1]))


def network(name: str) -> nn.Module:
    """Return a network with its initial weights, in float64."""
    torch.manual_seed(0)
    return (resnet9(10, width=4) if name == "resnet9" else Recurrent()).double()


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4 * BATCH + 5, 3, 32, 32, generator=generator, dtype=torch.float64)
    return TensorDataset(images, torch.randint(10, (len(images),), generator=generator))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def train_by_hand(name: str) -> list[float]:
    """Train with DistributedDataParallel, without Lightning and the engine; return the mean loss of each step."""
    dist.init_process_group("gloo")
    net = DistributedDataParallel(network(name))
    optimizer, losses = optimizer_of(net), list[float]()
    sampler: Any = DistributedSampler(samples(), shuffle=False, drop_last=True)
    loader = DataLoader(samples(), BATCH // RANKS, sampler=sampler, drop_last=True)
    while len(losses) < STEPS:
        for images, labels in loader:
            loss = F.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach() / RANKS
            dist.all_reduce(mean)
            losses.append(float(mean))
    return losses[:STEPS]


class Data(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(samples(), BATCH)


class Module(L.LightningModule):
    def __init__(self, net: str) -> None:
        super().__init__()
        self.net = network(net)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self.net)


@pytest.fixture(scope="module", params=["resnet9", pytest.param("recurrent", marks=pytest.mark.slow)])
def by_hand(request: pytest.FixtureRequest, pool: Pool) -> tuple[str, list[float]]:
    losses, *others = pool.run(RANKS, train_by_hand, request.param)
    assert all(other == losses for other in others)
    return request.param, losses


@pytest.mark.parametrize("place", ["together", "one by one", "one by one, strategy=ddp trainer.devices=2"])
def test_losses_are_those_of_torch(place: str, by_hand: tuple[str, list[float]], pool: Pool, folder: Path) -> None:
    name, expected = by_hand
    words = [word for word in place.replace(",", "").split() if "=" in word]
    groups = ["~data", f"+data._target_={__name__}.Data", "~module", f"+module._target_={__name__}.Module"]
    groups += [f"+module.net={name}", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
    length = ["trainer.precision=64-true", f"trainer.max_steps={STEPS}", "trainer.max_epochs=-1"]
    exact = [f"virtual_ranks={RANKS}", f"bit_exact={str(place != 'together').lower()}"]
    cfg = compose(folder, *groups, *length, *exact, "trainer.log_every_n_steps=1", *words)
    for record in fit_ranks(cfg, pool):
        assert record.losses == pytest.approx(expected, rel=1e-12)
