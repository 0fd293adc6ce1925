"""The random numbers of samples and batches are functions of their keys."""

import random

import numpy as np
import pytest
import torch

from onecurve.errors import UserError
from onecurve.random.seeding import SeededSamples, are_equal, refuse_draws


def draws() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


class Noise(torch.utils.data.Dataset[list[float]]):
    def __getitem__(self, position: int) -> list[float]:
        return [position, *draws()]


def fetch(positions: list[int], keys: list[int], is_divided: bool = False) -> tuple[list[list[float]], list[float]]:
    """Return the samples of a batch, and what `collate_fn` draws."""
    samples = SeededSamples(Noise(), lambda items: (items, draws() if not is_divided else []), is_divided)
    return samples.__getitems__(torch.tensor([positions, keys]))[1]


def test_the_key_of_a_sample_gives_its_numbers() -> None:
    one, two, again = fetch([3, 4], [7, 8])[0], fetch([4, 3], [8, 7])[0], fetch([3], [9])[0]
    assert one == two[::-1]
    assert one[0][1:] != one[1][1:]
    assert again[0] != one[0]


def test_the_key_of_the_first_sample_gives_the_numbers_of_the_batch() -> None:
    assert fetch([3, 4], [7, 8])[1] == fetch([5, 6], [7, 9])[1]
    assert fetch([3, 4], [7, 8])[1] != fetch([3, 4], [8, 7])[1], "each batch has numbers of its own"


def test_fetching_leaves_the_generators_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    fetch([1], [2])
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    "draw", [torch.rand, np.random.rand, lambda _: random.random()], ids=["torch", "numpy", "random"]
)
def test_a_part_of_a_batch_must_not_draw(draw: object) -> None:
    with pytest.raises(UserError, match="collate_fn draws random numbers"), refuse_draws("collate_fn", is_divided=True):
        draw(1)  # type: ignore[operator]
    with refuse_draws("collate_fn", is_divided=False):
        draw(1)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([torch.ones(2)], [torch.ones(2)], True),
        ([torch.ones(2)], [torch.ones(3)], False),
        ([torch.tensor(float("nan"))], [torch.tensor(float("nan"))], True),
        ([torch.ones(2)], [torch.ones(2), 1], False),
        ({"x": np.ones(2), "y": "a"}, {"x": np.ones(2), "y": "a"}, True),
        ({"y": "a"}, {"y": "b"}, False),
        ([object()], [object()], True),
    ],
)
def test_equal_batches(a: object, b: object, expected: bool) -> None:
    assert are_equal(a, b) is expected
