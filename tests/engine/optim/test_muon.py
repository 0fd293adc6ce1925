"""Muon takes orthogonal steps for filters and SGD steps for the rest, in named groups."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import onecurve
from onecurve.optim.groups import build_optimizer
from onecurve.optim.muon import muon, orthogonalize
from src.models.airbench import airbench
from tests.support.runs import compose


def build(net: nn.Module, **options: Any) -> Optimizer:
    return build_optimizer(net, partial(muon, **({"lr": 0.1} | options)), 1.0, "net.")


def take_steps(net: nn.Module, optimizer: Optimizer, steps: int = 3) -> dict[str, Tensor]:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator) if parameter.requires_grad else None
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in net.named_parameters()}


def test_takes_the_parameters_of_a_module() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = onecurve.muon(net.named_parameters(), lr=0.1)
    before = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    after = take_steps(net, optimizer, steps=1)
    assert all(not torch.equal(after[name], before[name]) for name in before)
    assert [group["name"] for group in optimizer.param_groups] == ["filters", "vectors"]


@pytest.mark.parametrize("shape", [(8, 64), (64, 8), (32, 4, 3, 3), (16, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_update_has_singular_values_near_one(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    update = orthogonalize([gradient], 8)[0]
    assert (update.shape, update.dtype) == (gradient.shape, dtype)
    values = torch.linalg.svdvals(update.flatten(1).double())
    assert 0.6 < values.min() <= values.max() < 1.3
    assert torch.equal(orthogonalize([gradient * 1024], 8)[0], update) or dtype == torch.float64


def test_tensors_of_equal_shape_are_orthogonalized_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "is_cuda", True)
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 4, 3, 3), (8, 20), (8, 4, 3, 3), (20, 8), (8, 36)]
    updates = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    updates[2] = updates[2].to(memory_format=torch.channels_last)
    for found, update in zip(orthogonalize(updates, 5), updates, strict=True):
        assert torch.allclose(found, orthogonalize([update], 5)[0], rtol=0, atol=1e-12)
        columns = orthogonalize([update.flatten(1)], 5)[0].view_as(update)
        assert torch.allclose(found, columns, rtol=0, atol=1e-12), "the order of the columns has no effect"


@pytest.mark.parametrize("is_cuda", [False, True])
def test_bits_do_not_depend_on_what_else_is_orthogonalized(is_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some CPUs multiply several matrices of a shape with another kernel than one."""
    monkeypatch.setattr(Tensor, "is_cuda", is_cuda)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    generator = torch.Generator().manual_seed(0)
    updates = [torch.randn(16, 8, 3, 3, generator=generator) for _ in range(4)]
    for found, update in zip(orthogonalize(updates, 5), updates, strict=True):
        assert torch.equal(found, orthogonalize([update], 5)[0])


def test_groups_parameters_by_role() -> None:
    optimizer = build(
        airbench(10, (8, 16, 16)), head_scale=3.0, vector_scale=2.0, weight_decay=0.01, whitening_fraction=0.5
    )
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert list(groups) == sorted(groups), "states are merged in order of the names"
    assert groups["whitening"]["param_names"] == ["net.layer1.whitening.bias"]
    assert groups["head"]["param_names"] == ["net.head.2.weight"]
    assert len(groups["filters"]["params"]) == len(groups["vectors"]["params"]) == 6
    assert [groups[name]["lr"] for name in ("filters", "head", "vectors")] == pytest.approx([0.1, 0.3, 0.2])
    assert [group["lr"] * group["weight_decay"] for group in groups.values()] == pytest.approx([0.01] * 4)
    assert [group["schedule_fraction"] for group in groups.values()] == [1, 1, 1, 0.5]


def test_speedrun_has_the_learning_rates_of_the_record(folder: Path) -> None:
    cfg = compose(folder, "experiment=speedrun")
    per_sample = cfg.optimizer.lr / cfg.data.batch_size
    assert per_sample * cfg.optimizer.head_scale == pytest.approx(0.67, rel=1e-5)
    assert per_sample * cfg.optimizer.vector_scale == pytest.approx(0.053, rel=1e-5)


def test_other_parameters_are_stepped_by_sgd() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(4))

    ours, theirs = net(), net()
    found = take_steps(ours, build(ours, vector_scale=2.0, vector_momentum=0.8, weight_decay=0.02))
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.2, momentum=0.8, nesterov=True, weight_decay=0.1)
    expected = take_steps(theirs, sgd)
    assert all(torch.allclose(found[name], tensor) for name, tensor in expected.items())


def test_unit_filters_have_a_norm_of_one_before_the_step() -> None:
    net = nn.Conv2d(3, 16, 3, bias=False)
    take_steps(net, build(net, lr=1e-9, unit_filters=True), 1)
    assert float(net.weight.detach().norm()) == pytest.approx(4.0, rel=1e-5)
