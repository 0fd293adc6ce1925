"""Every model under every strategy, both found by globbing: two steps in float64 that agree with one process."""

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

from src.experiment import assemble
from tests.parity.test_parity import TOLERANCE
from tests.pool import Pool
from tests.runs import CONF, STRATEGIES, compose, drives_all_devices, whole

MODELS = sorted(file.stem for file in (CONF / "model").glob("*.yaml"))
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


class Sketch(L.Callback):
    """Of each step its loss, and of each tensor at the end one number that any difference would change."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if len(self.losses) < trainer.global_step:
            self.losses.append(float(trainer.callback_metrics["train/loss"]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        numbers = {name: _projection(tensor.double()) for name, tensor in whole(pl_module.state_dict()).items()}
        Path(trainer.default_root_dir).mkdir(exist_ok=True)
        torch.save({"losses": self.losses} | numbers, f"{trainer.default_root_dir}/sketch.{trainer.global_rank}")


def _projection(tensor: Tensor) -> float:
    """The product with a fixed direction, relative to the tensor's size: large networks need not travel whole."""
    direction = torch.cos(torch.arange(tensor.numel(), dtype=torch.float64)).view_as(tensor)
    return float((tensor * direction).sum() / tensor.norm().clamp_min(1e-300))


def sketch(cfg: DictConfig) -> None:
    trainer, module, data = assemble(cfg)
    trainer.callbacks.append(Sketch())
    trainer.fit(module, datamodule=data)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def reference(
    model: str, small: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[str, Any]]:
    """The single process's run, which accumulates the micro-batches that a pipeline makes."""

    @functools.cache
    def run(micro_batches: int) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("single")
        accumulate = f"trainer.accumulate_grad_batches={micro_batches}"
        sketch(compose(folder, *small, *TASK, f"model={model}", accumulate))
        found = torch.load(folder / "sketch.0")
        shutil.rmtree(folder)  # checkpoints of all models would be gigabytes
        return found

    return run


SPAWNING = "ddp_spawn"  # takes ten seconds and more to start, and then does what ddp does


@pytest.mark.parametrize(
    "strategy", [pytest.param(name, marks=[pytest.mark.slow] if name == SPAWNING else []) for name in STRATEGIES]
)
def test_agrees_with_single_process(
    model: str, reference: Callable[[int], dict[str, Any]], strategy: str, pool: Pool, small: list[str], folder: Path
) -> None:
    cfg = compose(folder, *small, *TASK, f"model={model}", f"strategy={strategy}", "trainer.devices=2")
    if drives_all_devices(cfg):
        sketch(cfg)
    else:
        pool.run(2, sketch, cfg)
    expected = reference(cfg.strategy.get("microbatches", 1))
    ranks = [torch.load(folder / f"sketch.{rank}") for rank in range(2)]
    assert {name for rank in ranks for name in rank} == set(expected)
    for found in ranks:
        losses = found.pop("losses")
        assert len(losses) == 2
        assert losses == pytest.approx(expected["losses"], rel=TOLERANCE)
        assert max(abs(number - expected[name]) for name, number in found.items()) < TOLERANCE
