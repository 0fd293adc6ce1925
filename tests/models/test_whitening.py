"""The whitening layer: its filters, and its bias once it is frozen."""

from typing import Any

import torch

from src.models.airbench import airbench
from src.models.whitening import Whitening

IMAGES = torch.nn.functional.avg_pool2d(
    torch.randn(200, 3, 34, 34, generator=torch.Generator().manual_seed(0)), 3, stride=1
)


def fitted() -> Whitening:
    layer = Whitening(3, 2)
    assert not layer.has_computed_filters
    layer.weight.data.copy_(layer.compute_filters(IMAGES, eps=1e-9))
    assert layer.has_computed_filters
    return layer


def test_whitens_patches_and_negates_them() -> None:
    layer = fitted()
    layer.bias.data.zero_()
    values = layer(IMAGES).detach().transpose(0, 1).flatten(1)
    assert torch.equal(values[:12], -values[12:])
    covariance = values[:12] @ values[:12].T / values.shape[1]
    assert torch.allclose(covariance, torch.eye(12), atol=1e-2)


def test_filters_do_not_depend_on_the_order_of_the_images() -> None:
    layer = Whitening(3, 2)
    assert torch.allclose(layer.compute_filters(IMAGES.flip(0)), layer.compute_filters(IMAGES), atol=1e-4)


def test_frozen_bias_has_no_gradient() -> None:
    net: Any = airbench(10, (8, 8, 8)).train()
    layer, first = net.layer1.whitening, net.layer1.stage[0]
    seen: list[bool] = []
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].requires_grad))
    gradients: dict[bool, dict[str, Any]] = {}
    for trains in (True, False):
        layer.trains_bias = trains
        net.zero_grad()
        net(IMAGES[:8]).square().sum().backward()
        gradients[trains] = {name: weight.grad for name, weight in net.named_parameters() if weight.requires_grad}
    assert seen == [True, False], "the frozen layer's output needs no gradient"
    bias = gradients[True].pop("layer1.whitening.bias")
    assert bias.abs().max() > 0
    assert torch.equal(gradients[False].pop("layer1.whitening.bias"), torch.zeros_like(bias))
    assert all(torch.allclose(gradients[False][name], tensor) for name, tensor in gradients[True].items())
    assert layer.weight.grad is None
