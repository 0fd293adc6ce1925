"""There is no host-device synchronization between log points, neither in our code nor in libraries."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from omegaconf import DictConfig

from src.run.experiment import assemble
from tests.support.pool import Pool
from tests.support.runs import compose
from tests.support.synchronizations import BetweenLogPoints, SynchronizationWatcher

# The defaults of a run: progress bar, metrics.csv, wandb and checkpoints; also a checkpoint by time within an epoch.
DEFAULT = ["trainer.accelerator=cpu", "model.width=4", "data.batch_size=32", "trainer.log_every_n_steps=4"]
SHORT = [*DEFAULT, "trainer.max_epochs=2", "callbacks.checkpoint.train_time_interval={seconds: 1000}"]
TRICKS = [
    *(
        "callbacks=[default,ema,gradients]",
        "trainer.gradient_clip_val=1.0",
        "module.label_smoothing=0.1",
        "data.augment.cutout=8",
    ),
    *("data.augment.mixup=0.2", "data.augment.cutmix=1.0", "data.augment.trivial=true", "data.batch_size=32"),
]


def find_synchronizations(cfg: DictConfig, *extra: L.Callback) -> list[str]:
    """Return the synchronizations of a run between its log points."""
    trainer, module, data = assemble(cfg)
    with SynchronizationWatcher() as watch:
        between = BetweenLogPoints(watch.on)
        trainer.callbacks[:0] = [between, *extra]
        trainer.fit(module, datamodule=data)
    assert between.steps >= 8  # each has two parts
    return list(dict.fromkeys(watch.waits))


@pytest.mark.parametrize("options", [[], TRICKS, ["data.device_resident=false"]], ids=["default", "tricks", "loader"])
def test_no_synchronization_between_log_points(options: list[str], small: list[str], folder: Path) -> None:
    logger = "logger=none" if options else "logger=wandb"
    assert find_synchronizations(compose(folder, *small, *SHORT, logger, *options, quiet=False)) == []


def test_no_synchronization_on_two_processes(pool: Pool, small: list[str], folder: Path) -> None:
    """The only exception is the consensus, once a second, on whether to continue."""
    two = ["logger=none", "strategy=ddp", "trainer.devices=2", "trainer.max_epochs=1", "model.width=2"]
    cfg = compose(folder, *small, *SHORT, *two, quiet=False)
    for waits in pool.run(2, find_synchronizations, cfg):
        assert [wait for wait in waits if "consensus.py" not in wait] == []


class Synchronize(L.Callback):
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        float(loss.detach())


def test_detects_a_synchronization_in_a_run(small: list[str], folder: Path) -> None:
    quick = ["model=mlp", "model.hidden=[16]", "data.batch_size=32", "trainer.log_every_n_steps=4"]
    found = find_synchronizations(compose(folder, *small, *quick, "trainer.max_epochs=2"), Synchronize())
    assert any("_local_scalar_dense" in wait and "test_synchronizations.py" in wait for wait in found)


@pytest.mark.parametrize(
    ("wait", "what"),
    [
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: bool(x.sum() > 0), "_local_scalar_dense"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x[x > 0], "aten::index"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: torch.tensor([1.0], device=x.device), "to a device"),
    ],
    ids="item bool tolist cpu numpy mask nonzero masked_select send".split(),
)
def test_detects_a_synchronization(wait: Callable[[torch.Tensor], Any], what: str) -> None:
    with SynchronizationWatcher() as watch, watch.on():
        wait(torch.zeros(3))
    assert any(what in found for found in watch.waits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("resident", ["true", "false"])
def test_no_synchronization_on_a_gpu(resident: str, small: list[str], folder: Path) -> None:
    """torch's own check raises at each synchronization."""
    options = ["trainer.accelerator=gpu", "trainer.devices=1", "logger=none", f"data.device_resident={resident}"]
    trainer, module, data = assemble(compose(folder, *small, *SHORT, *options, quiet=False))
    between = BetweenLogPoints(_no_sync)
    trainer.callbacks.insert(0, between)
    trainer.fit(module, datamodule=data)
    assert between.steps >= 16


@contextmanager
def _no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
