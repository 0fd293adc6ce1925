"""Attributes of the user's modules, without those of torch and of its compiler."""

from typing import Any

import lightning as L
import torch
from torch import nn

from onecurve.network.module_state import all_attributes, attributes
from onecurve.patches.torch import AUTOCAST_FLAG
from onecurve.random.dropout import use_sample_dropout


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
