"""Networks are ordered blocks of the published size, and work under every strategy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from onecurve.targets import build
from src.models.mlp import mlp
from src.models.resnet9 import resnet9
from tests.support.choices import MODELS
from tests.support.runs import CONF, compose

AIRBENCH_FILTERS = [(24, 64), (64, 64), (64, 256), (256, 256), (256, 256), (256, 256)]  # 3 x 3, inputs and outputs
SIZES = {  # parameters for ten classes, as published, or computed from the published layers
    "resnet9": 6_573_120 + 10,  # the widest, with a bias
    "resnet18": 11_173_962,
    "resnet34": 21_282_122,
    "resnet50": 23_520_842,
    "preact_resnet18": 11_171_146 + 2 * 512,  # plus the normalization before the head
    "wide_resnet": 36_479_194,
    "vgg16": 14_728_266,
    "mlp": (3072 + 1) * 256 + (256 + 1) * 128 + (128 + 1) * 10,
    "airbench": sum(9 * i * o + 2 * o for i, o in AIRBENCH_FILTERS) + (12 + 1) * 24 + 256 * 10,
    # DeiT-Tiny: smaller patches, fewer positions and classes
    "vit": 5_717_416 - 3 * (16**2 - 4**2) * 192 - (197 - 65) * 192 - (1000 - 10) * (192 + 1),
}
NORMS = [name for name in MODELS if "norm:" in (CONF / "model" / f"{name}.yaml").read_text()]


@pytest.mark.parametrize("name", MODELS)
def test_is_a_composition_of_blocks_that_trains_each_parameter(name: str, folder: Path) -> None:
    net = build(compose(folder, "data=cifar100", "data.image_shape=[1,32,32]", f"model={name}").model).eval()
    x = images = torch.randn(2, 1, 32, 32)
    logits = net(images)
    assert logits.shape == (2, 100), "it follows the number of classes"
    if name in SIZES:  # a network of one's own need not be a list of blocks
        for block in net.children():
            x = block(x)
        assert torch.equal(x, logits)
        assert len(list(net.children())) >= 3
    logits.logsumexp(1).sum().backward()
    for parameter_name, parameter in net.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, parameter_name


@pytest.mark.parametrize("name", SIZES)
def test_has_the_published_size(name: str, folder: Path) -> None:
    widest = ["model.width=64"] if name == "resnet9" else []
    with torch.device("meta"):
        net = build(compose(folder, f"model={name}", *widest).model)
    assert sum(parameter.numel() for parameter in net.parameters()) == SIZES[name]


@pytest.mark.parametrize("name", NORMS)
def test_group_normalization_replaces_every_batch_normalization(name: str, folder: Path) -> None:
    def parts(norm: str) -> list[nn.Module]:
        with torch.device("meta"):
            return list(build(compose(folder, f"model={name}", f"model.norm={norm}").model).modules())

    replaced = sum(isinstance(part, nn.BatchNorm2d) for part in parts("batch"))
    assert sum(isinstance(part, nn.GroupNorm) for part in parts("group")) == replaced > 0
    assert not any(isinstance(part, nn.BatchNorm2d) for part in parts("group"))


def test_sizes_may_be_numbers_of_numpy() -> None:
    assert len(mlp(10, (3, 4, 4), np.array([8, 4]), np.float32(0.1))) == 4  # type: ignore[arg-type]
    assert len(resnet9(10, np.int64(4))) == 5  # type: ignore[arg-type]
