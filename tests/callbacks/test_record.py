"""The banner of a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from src.callbacks.record import RunRecord
from src.run.experiment import assemble
from tests.support.experiments import SHORT
from tests.support.runs import compose


@pytest.mark.parametrize(("device", "batch", "hints"), [("cuda", 16, True), ("cuda", 64, False), ("cpu", 16, False)])
def test_a_gpu_with_few_images_gets_a_hint(
    device: str, batch: int, hints: bool, small: list[str], folder: Path
) -> None:
    cfg = compose(folder, *small, "experiment=parity", *SHORT, f"data.batch_size={batch}")
    trainer, module, data = assemble(cfg)
    data.trainer = trainer
    data.prepare_data()
    data.setup("fit")
    trainer.strategy.optimizers = [torch.optim.SGD(module.parameters(), lr=0.1)]
    record: Any = RunRecord(cfg)
    stand_in: Any = SimpleNamespace(
        datamodule=data, optimizers=trainer.optimizers, world_size=1, precision=trainer.precision
    )
    banner = record._banner(stand_in, SimpleNamespace(device=torch.device(device)))
    assert ("hint" in banner) is hints
