"""Comparisons of what objects hold."""

from typing import Any

import numpy as np
import pytest
import torch

from onecurve.network.object_state import are_equal


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([2.0, 3.0]), False),
        (torch.tensor([2.0, 3.0]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan]), False),
        (torch.tensor([[1.0], [1.0]]), torch.tensor([1.0, 1.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0, 1.0]), False),
        (torch.tensor([1.0]), np.array([1.0]), True),
        (torch.tensor([1.0]), 2.0, True),
        ([1, 2], [1, 2], True),
        ([1, 2], [1, 3], False),
        ([1, 2], [1], False),
        ([1], [1, 2], False),
        ([1, "a"], [1, "b"], False),
        (np.array([1]), np.array([2]), False),
        (1.5, 2.5, True),
        ([torch.ones(2)], [torch.ones(2)], True),
        ([torch.ones(2)], [torch.ones(3)], False),
        ([torch.tensor(float("nan"))], [torch.tensor(float("nan"))], True),
        ([torch.ones(2)], [torch.ones(2), 1], False),
        ({"x": np.ones(2), "y": "a"}, {"x": np.ones(2), "y": "a"}, True),
        ({"y": "a"}, {"y": "b"}, False),
        ([object()], [object()], True),
    ],
)
def test_equal_batches(a: Any, b: Any, expected: bool) -> None:
    assert are_equal(a, b) is expected
