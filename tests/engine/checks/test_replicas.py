"""Ranks with different learning rates, buffers or frozen weights end in one line; different attributes are named."""

import logging
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecurve.errors import UserError
from tests.support.comparison import read_rows
from tests.support.habits import Vectors
from tests.support.interruption import die
from tests.support.pool import Pool, RankFailed
from tests.support.runs import compose, fit

OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
OWN += ["trainer.max_epochs=4", "+data._target_=tests.support.habits.VectorData", "trainer.devices=2"]


class OwnRate(L.Callback):
    """Sets the learning rate from the loss of its rank."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] = 0.01 * float(outputs["loss"].detach())


class OwnClassifier(L.Callback):
    """Trains a layer of the module by the samples of a rank, with an optimizer of its own."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.probe = nn.Linear(16, 3)
        self.optimizer = torch.optim.SGD(pl_module.probe.parameters(), 0.1)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > 1:
            torch.nn.functional.cross_entropy(pl_module.probe(batch[0]), batch[1]).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


class Centering(nn.Linear):
    """Takes the first value of its bias from the samples of the first pass, as an ActNorm of a flow does."""

    is_new = True

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.is_new:
            self.bias.data = -input.detach().mean(0) @ self.weight.detach().T
            self.is_new = False
        return super().forward(input)


class Centers(Vectors):
    def __init__(self) -> None:
        super().__init__()
        self.net[4] = Centering(32, 3)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [("ddp", r"net\.4\.bias differs between the ranks"), ("fsdp", r"writes into the trained weight net\.4\.bias, wh")],
)
def test_first_values_from_samples(strategy: str, message: str, pool: Pool, folder: Path) -> None:
    with pytest.raises(RankFailed, match=message):
        pool.run(2, fit, compose(folder, *OWN, f"+module._target_={__name__}.Centers", f"strategy={strategy}"))


class ScalesGradients(L.LightningModule):
    """Multiplies the gradients by the loss of the samples, as methods that balance losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.net = False, nn.Sequential(nn.Linear(16, 3))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, optimizer = F.cross_entropy(self.net(batch[0]), batch[1]), cast(Any, self.optimizers())
        optimizer.zero_grad()
        self.manual_backward(loss)
        for weight in self.net.parameters():
            weight.grad = None if weight.grad is None else weight.grad * loss.item()
        optimizer.step()


def test_a_run_that_goes_on_compares_trained_weights(pool: Pool, folder: Path) -> None:
    words = [*OWN, f"+module._target_={__name__}.ScalesGradients", "trainer.devices=1"]
    die(compose(folder, *words), "on_train_batch_start", 3)
    cfg = compose(folder, *words, "strategy=ddp", "trainer.devices=2", f"ckpt_path={folder}/died.ckpt")
    with pytest.raises(RankFailed, match=r"net\.0\.bias differs between the ranks"):
        pool.run(2, fit, cfg)


class Warmed(Vectors):
    """A buffer, a frozen weight or an attribute that moves by the samples of a rank, after a warm-up."""

    def __init__(self, moved: str, warmup: int = 2) -> None:
        super().__init__()
        self.warmup, self.moved, self.total, self.table = warmup, moved, 0.0, torch.zeros(2)
        self.register_buffer("center", torch.zeros(2))
        self.code = torch.nn.Parameter(torch.zeros(2, 2), requires_grad=False)

    @torch.no_grad()
    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        if self.trainer.global_step >= self.warmup:
            own = getattr(self, self.moved)
            setattr(self, self.moved, own + float(x.mean())) if isinstance(own, float) else own.add_(x.mean())
        with torch.enable_grad():
            return super().mean(x, y, batch_idx)


FOUND = {
    "rate": ["+module._target_=tests.support.habits.Vectors", f"+callbacks.rate._target_={__name__}.OwnRate"],
    "probe": ["+module._target_=tests.support.habits.Vectors", f"+callbacks.probe._target_={__name__}.OwnClassifier"],
    **{kind: [f"+module._target_={__name__}.Warmed", f"+module.moved={kind}"] for kind in ("center", "code")},
}
MESSAGES = {
    "rate": r"lr of `group 00` of optimizer 0 differs between the ranks: .* Log with sync_dist=True",
    "probe": r"probe\.(bias|weight) differs between the ranks: .* reduce what changes it over the ranks",
    "center": "center differs between the ranks: .* set bit_exact=true, or reduce",
    "code": "code differs between the ranks: .* Register it as a buffer and set bit_exact=true",
}
RARELY = "trainer.log_every_n_steps=1000"
PLACES = {
    "log point": ["trainer.log_every_n_steps=3", "trainer.limit_val_batches=0"],
    "validation": [RARELY],
    "save": [RARELY, "trainer.limit_val_batches=0", "callbacks=default", "callbacks.best=null"],
}


# Each kind at a log point, and each place with one kind.
QUICK = [*((kind, "log point") for kind in FOUND), ("rate", "validation"), ("center", "save")]
ROWS = [
    pytest.param(kind, place, marks=[] if (kind, place) in QUICK else pytest.mark.slow)
    for kind in FOUND
    for place in PLACES
]


@pytest.mark.parametrize(("kind", "place"), ROWS)
def test_found(kind: str, place: str, pool: Pool, folder: Path) -> None:
    words = [*OWN, *FOUND[kind], "strategy=ddp", *PLACES[place]]
    with pytest.raises(RankFailed, match=f"UserError: {MESSAGES[kind]}") as caught:
        pool.run(2, fit, compose(folder, *words))
    assert str(caught.value).count("UserError: ") == 2  # on both ranks
    assert not list((folder / "checkpoints").glob("*"))
    assert len(read_rows(folder)) == 1  # of the first step


class SetsScale(Vectors):
    """Sets a buffer on one rank, as latent diffusion does by its first batch."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1 and self.trainer.is_global_zero:
            del self.scale
            self.register_buffer("scale", torch.full((), 0.5))


def test_a_hook_that_sets_a_buffer_on_one_rank(pool: Pool, folder: Path) -> None:
    words = [*OWN, f"+module._target_={__name__}.SetsScale", "strategy=ddp", "bit_exact=true"]
    with pytest.raises(RankFailed, match=r"scale differs between the ranks: .* give all ranks that of rank zero"):
        pool.run(2, fit, compose(folder, *words))


class Coded(nn.Linear):
    """Moves a frozen weight by its inputs."""

    def __init__(self) -> None:
        super().__init__(32, 3)
        self.code = nn.Parameter(torch.zeros(32), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            self.code.data.lerp_(input.detach().mean(0), 0.1)
        return super().forward(input - self.code)


class WithCode(Vectors):
    def __init__(self, is_moved: bool = True) -> None:
        super().__init__()
        self.net[4] = Coded() if is_moved else nn.Linear(32, 3).requires_grad_(False)


@pytest.mark.parametrize(
    ("way", "devices"),
    [("bit_exact=false", 2), *(pytest.param("bit_exact=true", ranks, marks=pytest.mark.slow) for ranks in (2, 4))],
)
def test_a_write_into_a_gathered_weight(way: str, devices: int, pool: Pool, folder: Path) -> None:
    """Of four virtual ranks on four processes the weights are shards before the only pass, and gathered after it."""
    words = [*OWN, f"+module._target_={__name__}.WithCode", "strategy=fsdp", way, f"trainer.devices={devices}"]
    with pytest.raises(RankFailed, match=r"the forward pass writes into the frozen weight net\.4\.code"):
        pool.run(devices, fit, compose(folder / "moved", *words))
    pool.run(devices, fit, compose(folder / "frozen", *words, "+module.is_moved=false"))


class FreezesFirst(L.Callback):
    """Freezes a layer of the first stage of a pipeline."""

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        next(pl_module.net.parameters()).requires_grad_(False)


def test_frozen_weights_in_one_stage(small: list[str], pool: Pool, folder: Path) -> None:
    """All ranks compare, also those whose stage has no frozen weight: else these would go on alone."""
    words = [*small, "experiment=parity", "strategy=hybrid", "strategy.data_parallel=fsdp", "trainer.devices=4"]
    words += ["strategy.microbatches=2", "trainer.max_steps=2", f"+callbacks.freeze._target_={__name__}.FreezesFirst"]
    pool.run(4, fit, compose(folder, *words))


def test_a_buffer_that_moves_with_each_micro_batch(folder: Path) -> None:
    words = [*OWN, *FOUND["center"], "+module.warmup=0", "trainer.devices=1", "trainer.accumulate_grad_batches=2"]
    with pytest.raises(UserError, match=r"the forward pass updates center once for each micro-batch, .* bit_exact=t"):
        fit(compose(folder, *words))


class Annealed(Vectors):
    """Moves a buffer once in each step, before its passes."""

    heat: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heat", torch.ones(1))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.heat.mul_(0.9)


def test_a_buffer_that_a_hook_moves_before_the_passes(folder: Path) -> None:
    words = [*OWN, f"+module._target_={__name__}.Annealed", "trainer.devices=1", "trainer.accumulate_grad_batches=2"]
    fit(compose(folder, *words, "trainer.max_steps=2"))


def test_found_under_fsdp(pool: Pool, folder: Path) -> None:
    words = [*OWN, *FOUND["center"], "trainer.log_every_n_steps=3", "strategy=fsdp", "module._target_=" + CENTERED]
    with pytest.raises(RankFailed, match=f"UserError: {MESSAGES['center']}"):
        pool.run(2, fit, compose(folder, *words))


class Centered(Warmed):
    """Has no weight of the module itself, which FSDP would not gather."""

    def __init__(self, moved: str) -> None:
        super().__init__(moved)
        del self.code


CENTERED = f"{__name__}.Centered"


def fit_and_warn(cfg: Any) -> list[str]:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("onecurve.checks.replicas"), Keep()
    logger.addHandler(handler)
    try:
        fit(cfg)
    finally:
        logger.removeHandler(handler)
    return messages


@pytest.mark.parametrize("moved", ["table", pytest.param("total", marks=pytest.mark.slow)])
def test_an_attribute_is_named_once(moved: str, pool: Pool, folder: Path) -> None:
    words = [*OWN, FOUND["center"][0], f"+module.moved={moved}", "strategy=ddp", "trainer.log_every_n_steps=1"]
    for messages in pool.run(2, fit_and_warn, compose(folder, *words)):
        (message,) = messages
        assert message.startswith(f"the ranks have different {moved}: if the loss reads it")
