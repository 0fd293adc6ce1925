"""A network that `setup` or `configure_model` makes is normalized, dropped out and converted like any other."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.comparison import TOLERANCE, check_replicas, check_resumed, check_same_rows, distances
from tests.support.habits import Vectors
from tests.support.interruption import die, run_on_ranks
from tests.support.pool import Pool
from tests.support.runs import Record, compose, fit, fit_ranks

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
OWN += ["trainer.log_every_n_steps=1", "trainer.max_epochs=2", "+data._target_=tests.support.habits.VectorData"]
OWN += ["trainer.precision=64-true"]
TWO = ["strategy=ddp", "trainer.devices=2"]


class Early(Vectors):
    """Makes its network in the constructor, with weights that do not depend on when they are made."""

    def __init__(self) -> None:
        super().__init__()
        del self.teacher
        self._make()

    def _make(self) -> None:
        first = nn.Linear(16, 32, bias=False)  # the gradient of a bias would be zero, but for rounding
        self.net = nn.Sequential(first, nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
        generator = torch.Generator().manual_seed(0)
        for weight in self.net.parameters():
            weight.data = torch.randint(-64, 64, weight.shape, generator=generator).to(weight.dtype) / 128

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean(batch[0], batch[1], batch_idx)
        self.log("train/loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Move no teacher."""


class InSetup(Early):
    """Makes its network in `setup`, with 32 bits."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def setup(self, stage: str) -> None:
        self._make()


class InConfigureModel(Early):
    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self._make()


class Lazy(Early):
    """Has a layer whose weight gets its shape in `setup`."""

    def __init__(self) -> None:
        super().__init__()
        first: Any = self.net[0]
        self.weight_of_first = first.weight.tolist()
        self.net[0] = nn.LazyLinear(32, bias=False)

    def setup(self, stage: str) -> None:
        first: Any = self.net[0]
        first(torch.zeros(1, 16, dtype=first.weight.dtype))
        first.weight.data = torch.tensor(self.weight_of_first, dtype=first.weight.dtype)


def of_class(module: type) -> list[str]:
    return [*OWN, f"+module._target_={__name__}.{module.__name__}"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type], Record]:
    """Return a function that trains a module on one process, once."""
    return functools.cache(lambda module: fit(compose(tmp_path_factory.mktemp("whole"), *of_class(module))))


HARDWARE = {"one": [], "ddp": TWO, "fsdp": ["strategy=fsdp", TWO[1]], "micro": ["trainer.accumulate_grad_batches=2"]}
ROWS = [
    *[(InSetup, name) for name in HARDWARE if name != "ddp"],
    *[(InConfigureModel, name) for name in ("one", "fsdp")],
    (Lazy, "ddp"),
    pytest.param(InSetup, "ddp", marks=pytest.mark.slow),
    *[pytest.param(InConfigureModel, name, marks=pytest.mark.slow) for name in ("ddp", "micro")],
]


@pytest.mark.parametrize(("late", "hardware"), ROWS)
def test_trains_as_one_of_the_constructor(
    late: type, hardware: str, whole: Callable[[type], Record], pool: Pool, folder: Path
) -> None:
    reference = whole(Early)
    records = fit_ranks(compose(folder, *of_class(late), *HARDWARE[hardware]), pool)
    check_replicas(records)
    for record in records:
        assert max(distances(record, reference)) < TOLERANCE
    check_same_rows(folder, reference.file.parent)


@pytest.mark.parametrize(
    ("late", "devices"),
    [
        (InSetup, 1),
        (InConfigureModel, 2),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in ((InSetup, 2), (InConfigureModel, 1))),
    ],
)
def test_resumes(late: type, devices: int, whole: Callable[[type], Record], pool: Pool, folder: Path) -> None:
    reference = whole(late)
    words = [*of_class(late), *TWO, f"trainer.devices={devices}"]
    run_on_ranks(pool, devices, die, compose(folder, *words), "on_train_batch_start", 5)
    resumed = compose(folder, *words, f"ckpt_path={folder}/died.ckpt")
    check_resumed(run_on_ranks(pool, devices, fit, resumed), reference, done=5)
    check_same_rows(folder, reference.file.parent)


def test_weights_are_not_rounded(folder: Path) -> None:
    die(compose(folder, *of_class(InSetup)), "on_train_batch_start", 5)
    record = fit(compose(folder, *of_class(InSetup), f"ckpt_path={folder}/died.ckpt"))
    saved = torch.load(folder / "died.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(record.initial["net.0.weight"], saved["net.0.weight"])


class OfTheSeed(InConfigureModel):
    """Draws its initial weights."""

    def _make(self) -> None:
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 3))


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_initial_weights_are_those_of_the_seed(strategy: str, pool: Pool, folder: Path) -> None:
    one, other = (fit(compose(folder / f"{seed}", *of_class(OfTheSeed), f"seed={seed}")) for seed in (0, 1))
    assert not torch.equal(one.initial["net.0.weight"], other.initial["net.0.weight"])
    for record in fit_ranks(compose(folder / "two", *of_class(OfTheSeed), f"strategy={strategy}", TWO[1]), pool):
        assert torch.equal(record.initial["net.0.weight"], one.initial["net.0.weight"])
