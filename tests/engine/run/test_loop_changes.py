"""engine/onecurve/run/loop_changes.py leaves signals to the project's own handler."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback, Timer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset, RandomIterableDataset
from torch.utils.data import DataLoader

import onecurve
from tests.support.pool import Pool
from tests.support.runs import compose, fit

STEPS = ["data.batch_size=8", "model=mlp", "trainer.max_steps=40", "trainer.log_every_n_steps=1000"]


def test_ranks_exchange_only_gradients_between_log_points(pool: Pool, small: list[str], folder: Path) -> None:
    """DDP itself reduces gradients. Unpatched, Lightning also broadcasts at each step whether a rank got SIGTERM."""
    cfg = compose(folder, *small, *STEPS, "trainer.devices=2", "trainer.limit_val_batches=0")
    for calls in pool.run(2, _collectives, cfg):
        # Before step 31: whether a rank received a signal, and whether a checkpoint is due.
        assert calls["all_reduce"] == 2, calls
        assert sum(calls.values()) <= 4, calls  # with a barrier before each


def _collectives(cfg: Any) -> Counter[str]:
    """Return how often Python calls each collective between steps 16 and 39."""
    counted: Counter[str] = Counter()
    names = ("all_reduce", "broadcast", "all_gather", "barrier", "all_gather_into_tensor")
    originals = {name: getattr(dist, name) for name in names}

    class Count(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 16:
                for name, original in originals.items():
                    setattr(dist, name, _counting(name, original))
            if batch_idx == 39:
                restore()

    def _counting(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return original(*args, **kwargs)

        return call

    def restore() -> None:
        for name, original in originals.items():
            setattr(dist, name, original)

    stopped_clock = SimpleNamespace(monotonic=lambda: 0.0)  # the interval between polls doubles each time
    try:
        with patch("onecurve.process.consensus.time", stopped_clock):
            fit(cfg, Count())
    finally:
        restore()
    return counted


def test_lightning_passes_over_the_empty_hooks_of_a_step(folder: Path) -> None:
    steps: list[str] = []
    calling = LambdaCallback(on_train_batch_start=lambda *_: steps.append("calling"))
    timer, own = Timer(), Own(steps)
    trainer = onecurve.Trainer(
        accelerator="cpu", max_steps=2, callbacks=[calling, timer, own], default_root_dir=folder, logger=False
    )
    trainer.fit(BoringModel(), DataLoader(RandomDataset(32, 16), batch_size=8))
    assert steps == ["calling", "own", "calling", "own"]
    assert timer.on_before_backward is None
    assert timer.time_elapsed("train") > 0  # its hooks are called
    own.on_before_backward(trainer, BoringModel(), None)  # as code of a project may


class Own(L.Callback):
    """A callback of a project."""

    def __init__(self, steps: list[str]) -> None:
        self.steps = steps

    def on_train_batch_start(self, *_: Any) -> None:
        self.steps.append("own")


class Accumulating(BoringModel):
    """Adds up gradients itself, of which the last of an epoch waits for the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(self(batch)))
        if batch_idx == 0:
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_gradients_stay_at_the_end_of_an_epoch_without_validation(folder: Path) -> None:
    """Lightning resets them before a validation."""
    options: dict[str, Any] = {"accelerator": "cpu", "max_epochs": 3, "limit_val_batches": 0, "logger": False}
    weights, loader = [], DataLoader(RandomDataset(32, 16), batch_size=8)
    for kind in (L.Trainer, onecurve.Trainer):
        trainer: Any = kind(default_root_dir=folder / kind.__module__, **options)
        torch.manual_seed(0)
        module = Accumulating()
        trainer.fit(module, loader)
        weights.append(module.layer.weight)
    assert torch.equal(*weights)


class CountsChecked(L.Callback):
    """Counts the samples of the sanity check, and notes whether a progress bar ends with its last batch."""

    samples, bar_is_full = 0, False

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.sanity_checking:
            self.samples += len(batch)
            self.bar_is_full = trainer.num_sanity_val_batches == [batch_idx + 1]


@pytest.mark.parametrize("kind", [RandomDataset, pytest.param(RandomIterableDataset, marks=pytest.mark.slow)])
def test_a_sanity_check_has_the_same_samples_in_any_number_of_parts(kind: Any, folder: Path) -> None:
    loader = DataLoader(RandomDataset(32, 60), batch_size=8)
    checked = DataLoader(kind(32, 60), batch_size=8)  # the parts cut 60 samples into batches of other sizes
    parts: list[dict[str, Any]] = [{}, {"bit_exact": True}, {"accumulate_grad_batches": 2}]
    for number, options in enumerate(parts):
        options |= {"accelerator": "cpu", "enable_progress_bar": False, "max_steps": 1, "callbacks": CountsChecked()}
        onecurve.Trainer(default_root_dir=folder / f"{number}", **options).fit(BoringModel(), loader, checked)
    assert [options["callbacks"].samples for options in parts] == [16] * 3
    assert all(options["callbacks"].bar_is_full for options in parts)


class FailsInSanityCheck(L.Callback):
    def on_validation_batch_end(self, *_: Any) -> None:
        raise RuntimeError("failed")


def test_a_sanity_check_that_fails_leaves_the_number_of_its_steps(folder: Path) -> None:
    loader = DataLoader(RandomDataset(32, 64), batch_size=8)
    options: dict[str, Any] = {"bit_exact": True, "accelerator": "cpu", "enable_progress_bar": False}
    trainer = onecurve.Trainer(default_root_dir=folder, callbacks=FailsInSanityCheck(), **options)
    with pytest.raises(RuntimeError, match="failed"):
        trainer.fit(BoringModel(), loader, loader)
    assert trainer.num_sanity_val_steps == 2
