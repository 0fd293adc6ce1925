"""Attributes of the user's modules, without those of torch and of its compiler."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader

import onecurve
from onecurve.network.module_state import all_attributes, attributes
from onecurve.patches.torch import AUTOCAST_FLAG
from onecurve.random.dropout import use_sample_dropout
from tests.support.pool import Pool


def test_a_converted_layer_has_the_attributes_of_torch() -> None:
    """A callback may change the probability of dropout."""
    module: Any = L.LightningModule()
    module.net, module.scale = nn.Sequential(nn.Dropout(0.25)), 2
    use_sample_dropout(module)
    assert attributes(module) == {"net.0.p": 0.25, "scale": 2}


class WithoutAutocast(nn.Linear):
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_what_torch_notes_of_autocast_is_no_attribute_of_the_user() -> None:
    layer = WithoutAutocast(2, 2)
    layer(torch.ones(1, 2))
    assert AUTOCAST_FLAG in vars(layer)
    assert AUTOCAST_FLAG not in all_attributes(layer)


def test_what_the_compiler_sets_is_no_attribute_of_the_user() -> None:
    layer: Any = torch.compile(nn.Linear(2, 2), backend="eager")  # which each process numbers by itself
    module = nn.Sequential(layer)
    assert [name for name in attributes(module) if "dynamo" in name] == []


class Normalized(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer: Any = nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))  # FSDP divides each

    def on_train_end(self) -> None:
        self.names = [name for name in all_attributes(self) if name.startswith("layer.1.is_")]


def attributes_on_shards(folder: Path) -> list[str]:
    trainer = onecurve.Trainer(strategy="fsdp", devices=2, accelerator="cpu", max_epochs=1, default_root_dir=folder)
    trainer.fit(module := Normalized(), DataLoader(RandomDataset(32, 32), batch_size=8))
    return module.names


def test_what_a_layer_needs_for_its_groups_is_no_attribute_of_the_user_on_shards(pool: Pool, folder: Path) -> None:
    assert pool.run(2, attributes_on_shards, folder) == [[], []]
