"""Every model under every strategy agrees with one process in float64; both are found by globbing.

`make test` trains three small networks, one of each architecture, each under one strategy: residual, transformer and
MLP. `make test-all` trains all models at their published sizes, except one.
"""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor

from onecurve.config.resolve import runs_in_single_process
from onecurve.parallel.batch_norm import average_statistics
from onecurve.run.experiment import assemble
from tests.support.choices import MODELS
from tests.support.comparison import TOLERANCE
from tests.support.pool import Pool
from tests.support.runs import STRATEGIES, compose, to_full_tensors

TASK = [
    "data.batch_size=4",
    "module.reference_batch_size=4",
    "optimizer.lr=0.01",
    "scheduler=constant",
    "trainer.precision=64-true",
    "trainer.max_steps=2",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=1",
    "callbacks.best=null",
    "callbacks.checkpoint=null",
]
SMALL = {
    "wide_resnet": ["model.width=1", "model.depth=10"],
    "vit": ["model.width=16", "model.depth=2", "model.heads=2", "model.patch=8"],
    "mlp": ["model.hidden=[16,8]"],
}
LARGE = {"wide_resnet": ["model.width=4"]}  # its 36 million weights in float64 take 2.7 GiB of a rank
QUICK = {"wide_resnet": "pipeline", "vit": "fsdp", "mlp": "pipeline"}
ROWS = [
    *[pytest.param(name, SMALL[name], QUICK[name], id=f"small {name}, {QUICK[name]}") for name in SMALL],
    *[
        pytest.param(name, size, strategy, id=f"{label}{name}, {strategy}", marks=pytest.mark.slow)
        for label, sizes in (("small ", SMALL), ("", {name: LARGE.get(name, []) for name in MODELS}))
        for name, size in sizes.items()
        for strategy in STRATEGIES
        if strategy != "auto" and not (label and QUICK[name] == strategy)  # `auto` is DDP on several devices
    ],
]


class Fingerprint(L.Callback):
    """Record each step's loss, and for each final tensor a number that any difference would change."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if len(self.losses) < trainer.global_step:
            self.losses.append(float(trainer.callback_metrics["train/loss"]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        average_statistics(pl_module)
        numbers = {
            name: _projection(tensor.double()) for name, tensor in to_full_tensors(pl_module.state_dict()).items()
        }
        Path(trainer.default_root_dir).mkdir(exist_ok=True)
        torch.save({"losses": self.losses} | numbers, f"{trainer.default_root_dir}/fingerprint.{trainer.global_rank}")


def _projection(tensor: Tensor) -> float:
    """Return the product with a fixed direction, relative to the tensor's norm, so that no tensor is copied."""
    direction = torch.cos(torch.arange(tensor.numel(), dtype=torch.float64)).view_as(tensor)
    return float((tensor * direction).sum() / tensor.norm().clamp_min(1e-300))


def fit_and_fingerprint(cfg: DictConfig) -> None:
    """Fit as configured, and write the run's fingerprint."""
    trainer, module, data = assemble(cfg)
    trainer.callbacks.append(Fingerprint())
    trainer.fit(module, datamodule=data)


@pytest.fixture(scope="session")
def single_process(small: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """Return a function that trains a single process."""

    @functools.cache
    def run(model: str, *size: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("single")
        fit_and_fingerprint(compose(folder, *small, *TASK, f"model={model}", *size))
        found = torch.load(folder / "fingerprint.0")
        shutil.rmtree(folder)  # checkpoints of all models would be gigabytes
        return found

    return run


@pytest.mark.parametrize(("model", "size", "strategy"), ROWS)
def test_agrees_with_single_process(
    model: str,
    size: list[str],
    strategy: str,
    single_process: Callable[..., dict[str, Any]],
    pool: Pool,
    small: list[str],
    folder: Path,
) -> None:
    chosen = [f"model={model}", *size, f"strategy={strategy}", "trainer.devices=2"]
    cfg = compose(folder, *small, *TASK, *chosen)
    if runs_in_single_process(cfg):
        fit_and_fingerprint(cfg)
    else:
        pool.run(2, fit_and_fingerprint, cfg)
    expected = single_process(model, *size)
    ranks = [torch.load(folder / f"fingerprint.{rank}") for rank in range(2)]
    assert {name for rank in ranks for name in rank} == set(expected)
    for found in ranks:
        losses = found.pop("losses")
        assert len(losses) == 2
        assert losses == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert max(abs(number - expected[name]) for name, number in found.items()) < TOLERANCE
