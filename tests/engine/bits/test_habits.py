"""Code that does not divide by samples is one experiment on any number of processes, with `bit_exact=true`."""

import copy
import functools
import random
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecurve.errors import UserError
from tests.support.bits import check_equal_bits, rows_of
from tests.support.comparison import TOLERANCE, distances
from tests.support.habits import Vectors
from tests.support.interruption import die
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit, fit_ranks

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
OWN += ["trainer.log_every_n_steps=1", "trainer.max_epochs=2"]
EXACT = [*OWN, "bit_exact=true"]
VECTORS, COUNTING, TAGGING, UNUSUAL = (
    [f"+data._target_=tests.support.habits.{data}", f"+module._target_=tests.support.habits.{module}"]
    for data, module in (
        ("VectorData", "Vectors"),
        ("VectorData", "Counting"),
        ("LineData", "Tagging"),
        ("NoisyVectorData", "Unusual"),
    )
)
KINDS = ("class_weights", "triplets", "numpy_mixup", "distillation")
HABITS = {
    **{name: [*VECTORS, f"+module.kind={name}"] for name in KINDS},
    "counting": COUNTING,
    "lbfgs": [*COUNTING, "+module.optimizer=lbfgs"],
    "tagging": TAGGING,
    "unusual": UNUSUAL,
}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Record]:
    """Return a function that trains on one process."""
    return functools.cache(lambda name: fit(compose(tmp_path_factory.mktemp("one"), *EXACT, *HABITS[name])))


QUICK = ("triplets", "counting", "lbfgs", "tagging", "unusual")  # the other kinds change the loss alone, as "triplets"
ROWS = [
    pytest.param(name, devices, marks=[] if name in QUICK and devices == 2 else pytest.mark.slow)
    for name in HABITS
    for devices in (2, 4)
]


@pytest.mark.parametrize(("name", "devices"), ROWS)
def test_has_the_bits_of_one_process(
    name: str, devices: int, one_process: Callable[[str], Record], pool: Pool, folder: Path
) -> None:
    ranks = fit_ranks(compose(folder, *EXACT, *HABITS[name], "strategy=ddp", f"trainer.devices={devices}"), pool)
    check_equal_bits(ranks, one_process(name))


class Collecting(Vectors):
    """Logs the mean of the batches that a process has evaluated."""

    is_reduced = True

    def on_validation_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(F.cross_entropy(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.losses).mean(), sync_dist=self.is_reduced)


class CollectingAlone(Collecting):
    is_reduced = False


class Gathering(Collecting):
    """Gathers what processes have predicted, of which they have different numbers."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses.append(self.net(batch[0]).argmax(1) == batch[1])

    def on_validation_epoch_end(self) -> None:
        correct = self.all_gather(torch.cat(self.losses)).flatten()
        self.log("val_acc", correct.double().mean(), sync_dist=True)
        self.log("val_samples", float(len(correct)), sync_dist=True)


@pytest.mark.parametrize(
    "way", [pytest.param(EXACT, id="one by one", marks=pytest.mark.slow), pytest.param(OWN, id="together")]
)
def test_gathers_different_numbers_of_predictions(way: list[str], pool: Pool, folder: Path) -> None:
    words = [*way, VECTORS[0], f"+module._target_={__name__}.Gathering", "trainer.precision=64-true"]
    one = fit(compose(folder / "one", *words)).metrics
    cfg = compose(folder / "several", *words, "strategy=ddp", f"trainer.devices={4 if way is OWN else 3}")
    for record in fit_ranks(cfg, pool):
        assert record.metrics["val_samples"] == one["val_samples"] == 37
        assert record.metrics["val_acc"] == one["val_acc"]


@pytest.mark.parametrize("name", ["Collecting", "CollectingAlone"])
def test_refuses_a_value_of_the_batches_of_a_process(name: str, pool: Pool, folder: Path) -> None:
    words = [*EXACT, VECTORS[0], f"+module._target_={__name__}.{name}", "strategy=ddp", "trainer.devices=2"]
    with pytest.raises(RankFailed, match="val_loss is logged outside of a step of the module, and processes have"):
        fit_ranks(compose(folder, *words), pool)


class Scaled(Vectors):
    """Divides the loss by a number that follows it, which no other process sees; and counts steps, which all do."""

    scale, steps = 1.0, 0

    def on_fit_start(self) -> None:
        self.best = float("nan")  # which is not equal to itself

    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = super().mean(x, y, batch_idx)
        self.scale = 0.9 * self.scale + 0.1 * float(loss.detach())
        return loss / self.scale

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.steps += 1


class ScaledLater(Scaled):
    """Its number begins with the first loss."""

    scale: float | None = None  # type: ignore[assignment]

    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        if self.scale is None:
            self.scale = float(Vectors.mean(self, x, y, batch_idx).detach())
            return Vectors.mean(self, x, y, batch_idx)
        return super().mean(x, y, batch_idx)


@pytest.mark.parametrize("name", ["Scaled", "ScaledLater"])
def test_names_an_attribute_that_a_pass_changes(name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(compose(folder, *EXACT, VECTORS[0], f"+module._target_={__name__}.{name}"))
    (message,) = [record.getMessage() for record in caplog.records if "training_step changes" in record.getMessage()]
    assert "changes scale: each process changes its own" in message


def test_a_continued_run_names_it_too(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = [*EXACT, VECTORS[0], f"+module._target_={__name__}.Scaled"]
    die(compose(folder, *words), "on_train_batch_end", 3)
    caplog.clear()
    fit(compose(folder, *words, f"ckpt_path={folder}/died.ckpt"))
    assert caplog.text.count("training_step changes scale") == 1


class Unseen(Vectors):
    """Changes what each attribute holds, but for one of numbers that stay."""

    def __init__(self, kind: str = "mean") -> None:
        super().__init__(kind)
        self.namespace, self.table, self.queue = SimpleNamespace(ema=0.0), {"a": {"b": 0}}, deque([0], maxlen=1)
        self.array, self.torch_draws = np.array([0.0, np.nan]), torch.Generator()
        self.numpy_draws, self.python_draws = np.random.default_rng(0), random.Random(0)
        self.same: dict[str, Any] = {"nan": [float("nan")], "array": np.array([np.nan]), "draws": random.Random(0)}

    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        loss = super().mean(x, y, batch_idx)
        self.namespace.ema = float(loss.detach())
        self.table["a"]["b"] += 1
        self.queue.append(self.queue[0] + 1)
        self.array[0] += 1
        torch.rand((), generator=self.torch_draws)
        self.numpy_draws.random()
        self.python_draws.random()
        return loss

    def decay(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net.get_parameter("4.weight").mul_(0.99)
        return super().mean(x, y, batch_idx)

    def decay_later(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        """As a normalization of weights that are frozen for an epoch."""
        return (self.decay if self.current_epoch else self.mean)(x, y, batch_idx)

    def normalize(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        weight = self.net.get_parameter("4.weight")
        weight.data = F.normalize(weight.data, dim=1)
        return super().mean(x, y, batch_idx)


UNSEEN = [VECTORS[0], f"+module._target_={__name__}.Unseen"]
ACCUMULATED = [*OWN, "trainer.accumulate_grad_batches=2"]


@pytest.mark.parametrize("way", [EXACT, ACCUMULATED], ids=["one by one", "micro-batches"])
def test_names_attributes_within_which_a_pass_changes_something(
    way: list[str], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(compose(folder, *way, *UNSEEN))
    (message,) = [record.getMessage() for record in caplog.records if "training_step changes" in record.getMessage()]
    names = "array, namespace, numpy_draws, python_draws, queue, table, torch_draws"
    assert f"training_step changes {names}: each process" in message


@pytest.mark.parametrize(
    ("way", "kind"), [(EXACT, "decay"), (ACCUMULATED, "decay"), (EXACT, "normalize"), (EXACT, "decay_later")], ids=str
)
def test_refuses_a_trained_weight_that_each_pass_changes(way: list[str], kind: str, folder: Path) -> None:
    message = (
        "the trained weight net.4.weight changes in training_step, .* write it in on_train_batch_end, once per step"
    )
    with pytest.raises(UserError, match=message):
        fit(compose(folder, *way, *UNSEEN, f"+module.kind={kind}"))


class Masked(nn.Linear):
    """Rewrites its weight in each pass, as the masked convolutions of a PixelCNN."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= torch.ones_like(self.weight).tril()
        return super().forward(x)


class Masking(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(Masked(16, 3))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_mask_of_a_weight_in_each_pass(devices: int, pool: Pool, folder: Path) -> None:
    words = [*EXACT, VECTORS[0], f"+module._target_={__name__}.Masking"]
    one = fit(compose(folder / "one", *words))
    cfg = compose(folder / "ranks", *words, "strategy=ddp", f"trainer.devices={devices}")
    check_equal_bits(fit_ranks(cfg, pool), one)


class Dropping(Vectors):
    """Masks a weight at random."""

    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        F.dropout(next(self.net[4].parameters()).data, inplace=True)
        return super().mean(x, y, batch_idx)


@pytest.mark.parametrize("devices", [1, 4])
def test_a_random_mask_of_a_weight_is_refused(devices: int, pool: Pool, folder: Path) -> None:
    words = [*EXACT, VECTORS[0], f"+module._target_={__name__}.Dropping", "strategy=ddp"]
    with pytest.raises(
        (UserError, RankFailed), match=r"net\.4\.weight (changes in training_step|differs between the ranks)"
    ):
        fit_ranks(compose(folder, *words, f"trainer.devices={devices}"), pool)


def test_a_normalization_in_each_micro_batch_is_one_in_the_step(folder: Path) -> None:
    words = [*UNSEEN, "+module.kind=normalize", "trainer.precision=64-true"]
    one, two = (fit(compose(folder / name, *way, *words)) for name, way in (("one", OWN), ("two", ACCUMULATED)))
    assert max(distances(two, one)) < TOLERANCE


class Draws(Vectors):
    """Logs the extremes of what the virtual ranks draw from each generator."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers: dict[str, Any] = {"torch": torch.rand(()), "numpy": np.random.rand(), "python": random.random()}
        for name, number in numbers.items():
            self.log(f"{name}_min", number, reduce_fx="min")
            self.log(f"{name}_max", number, reduce_fx="max")
        return super().training_step(batch, batch_idx)


def test_each_virtual_rank_draws_numbers_of_its_own(folder: Path) -> None:
    fit(compose(folder, *EXACT, VECTORS[0], f"+module._target_={__name__}.Draws"))
    for row in rows_of(folder)[:-1]:
        for name in ("torch", "numpy", "python"):
            assert float(row[f"{name}_max"]) - float(row[f"{name}_min"]) > 0.01


class Functional(Vectors):
    """Draws for each sample by functions."""

    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        x = F.dropout(x, 0.2) + 0.1 * torch.randn_like(x)
        return F.cross_entropy(F.dropout(self.net(x), 0.1), y)


def test_functions_draw_for_samples_as_without_virtual_ranks(folder: Path) -> None:
    words = [*OWN, VECTORS[0], f"+module._target_={__name__}.Functional", "trainer.precision=64-true"]
    together, one_by_one = (fit(compose(folder / kind, *words, f"bit_exact={kind}")) for kind in ("false", "true"))
    assert max(distances(one_by_one, together)) < TOLERANCE
