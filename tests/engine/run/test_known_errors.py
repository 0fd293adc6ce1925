"""Errors of Lightning in one line, also for a script."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

import onecurve
from onecurve.errors import UserError


class CachesPositions(BoringModel):
    """Registers a buffer in the forward pass, so that its checkpoints have one that a new module does not."""

    def forward(self, x: Any) -> Any:
        if not hasattr(self, "positions"):
            self.register_buffer("positions", torch.arange(32.0))
        return super().forward(x)


def test_a_continued_run_of_another_network(folder: Path) -> None:
    def fit(max_epochs: int) -> None:
        options: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "default_root_dir": folder}
        trainer = onecurve.Trainer(**options, max_epochs=max_epochs, seed=0)
        trainer.fit(CachesPositions(), DataLoader(RandomDataset(32, 16), batch_size=8), ckpt_path="last")

    fit(1)
    with pytest.raises(UserError, match=r"^ckpt_path contains another network .*Unexpected key.*positions.*\)$"):
        fit(2)
