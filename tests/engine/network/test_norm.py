"""The norm of bit-exact runs does not depend on the order of the elements, or on who holds them."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from onecurve.network import norm
from onecurve.network.norm import order_free_norm
from tests.support.pool import Pool

CPU = torch.device("cpu")


def elements() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1000, generator=generator) * 10 ** (3 * torch.randn(1000, generator=generator))


def own_norm(sizes: list[int]) -> Tensor:
    dist.init_process_group("gloo")
    return order_free_norm([elements().split(sizes)[dist.get_rank()]], CPU, dist.group.WORLD)


def test_any_order_and_division_has_the_same_bits(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    values = elements()
    found = order_free_norm([values], CPU)
    assert float(found) == pytest.approx(float(values.double().norm()), rel=1e-9)
    assert torch.equal(order_free_norm([values.flip(0)], CPU), found)
    assert torch.equal(order_free_norm(list(values.flip(0).split(7)), CPU), found)
    monkeypatch.setattr(norm, "_CHUNK", 64)
    assert torch.equal(order_free_norm([values], CPU), found)
    assert all(torch.equal(other, found) for other in pool.run(2, own_norm, [990, 10]))
    assert all(torch.equal(other, found) for other in pool.run(3, own_norm, [1000, 0, 0]))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_is_exact_for_small_and_large_numbers(scale: float) -> None:
    values = torch.tensor([3.0, 4.0], dtype=torch.float64) * scale
    assert float(order_free_norm([values], CPU)) == pytest.approx(5 * scale, rel=1e-12)


def test_other_numbers() -> None:
    assert float(order_free_norm([torch.zeros(3)], CPU)) == 0
    assert float(order_free_norm([torch.tensor([3 + 4j])], CPU)) == pytest.approx(5)
    for value in (math.inf, math.nan):
        assert not order_free_norm([torch.tensor([1.0, value])], CPU).isfinite()
