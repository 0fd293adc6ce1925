"""Every model under every strategy, both found by globbing: two steps in float64 that agree with one process."""

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
    "data.batch_size=2",
    "module.reference_batch_size=2",
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
def reference(model: str, small: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("single")
    sketch(compose(folder, *small, *TASK, f"model={model}"))
    return torch.load(folder / "sketch.0")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_agrees_with_single_process(
    model: str, reference: dict[str, Any], strategy: str, pool: Pool, small: list[str], folder: Path
) -> None:
    cfg = compose(folder, *small, *TASK, f"model={model}", f"strategy={strategy}", "trainer.devices=2")
    if drives_all_devices(cfg):
        sketch(cfg)
    else:
        pool.run(2, sketch, cfg)
    assert len(reference["losses"]) == 2
    for rank in range(2):
        found = torch.load(folder / f"sketch.{rank}")
        assert found.pop("losses") == pytest.approx(reference["losses"], rel=TOLERANCE)
        assert max(abs(number - reference[name]) for name, number in found.items()) < TOLERANCE
