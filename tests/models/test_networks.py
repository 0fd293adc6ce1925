"""Networks are plain, ordered blocks, of the published size, and nothing that a strategy would stumble over."""

import pytest
import torch
from torch import nn

from src.experiment import build
from tests.runs import CONF, compose

MODELS = sorted(file.stem for file in (CONF / "model").glob("*.yaml"))
PUBLISHED = {"resnet18": 11_173_962}  # parameters, for ten classes


@pytest.fixture(params=MODELS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, nn.Module]:
    cfg = compose(tmp_path_factory.mktemp("run"), f"model={request.param}")
    torch.manual_seed(0)
    return request.param, build(cfg.model)


def test_is_the_composition_of_its_blocks(network: tuple[str, nn.Module]) -> None:
    net = network[1].eval()
    x = pictures = torch.randn(2, 3, 32, 32)
    for block in net.children():
        x = block(x)
    assert torch.equal(x, net(pictures))
    assert x.shape == (2, 10)
    assert len(list(net.children())) >= 3


def test_has_the_published_size(network: tuple[str, nn.Module]) -> None:
    name, net = network
    size = sum(parameter.numel() for parameter in net.parameters())
    assert size == PUBLISHED.get(name, size)
    assert size > 0


def test_every_parameter_gets_a_gradient(network: tuple[str, nn.Module]) -> None:
    net = network[1]
    net(torch.randn(4, 3, 32, 32)).logsumexp(1).sum().backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []


def test_is_initialised_by_the_seed(network: tuple[str, nn.Module], tmp_path_factory: pytest.TempPathFactory) -> None:
    cfg = compose(tmp_path_factory.mktemp("run"), f"model={network[0]}")
    torch.manual_seed(0)
    again = build(cfg.model)
    for name, tensor in network[1].state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


def test_follows_the_number_of_classes(tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in MODELS:
        cfg = compose(tmp_path_factory.mktemp("run"), "data=cifar100", f"model={name}")
        assert build(cfg.model).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 100)
