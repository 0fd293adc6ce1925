"""The batches of several parts become one, in which each value is that of its sample."""

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from onecurve.data.batch import StepPart, join

Pair = namedtuple("Pair", ["x", "name"])


def rows(*values: float) -> Tensor:
    return torch.tensor(values)


def parts(*sizes: int | None) -> list[StepPart]:
    return [StepPart(torch.arange(size or 0), None, 1.0, size) for size in sizes]


def plain(value: Any) -> Any:
    """Return lists in place of tensors and arrays, which `==` compares."""
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(
    ("batches", "sizes", "expected"),
    [
        (
            [{"x": rows(1, 2, 3), "name": ["a", "b", "c"]}, {"x": rows(4, 5, 6), "name": ["d", "e", "f"]}],
            (3, 3),
            {"x": [1, 2, 3, 4, 5, 6], "name": ["a", "b", "c", "d", "e", "f"]},
        ),
        # As many samples as the batch has entries.
        (
            [[rows(1, 2), ("a", "b")], [rows(3, 4), ("c", "d")]],
            (2, 2),
            [[1, 2, 3, 4], ["a", "b", "c", "d"]],
        ),
        ([[rows(1, 2), rows(5, 6)], [rows(3, 4), rows(7, 8)]], (2, 2), [[1, 2, 3, 4], [5, 6, 7, 8]]),
        ([[rows(1, 2), torch.tensor(1.0)], [rows(3, 4), torch.tensor(2.0)]], (2, 2), [[1, 2, 3, 4], 1.5]),
        ([Pair(rows(1), ["a"]), Pair(rows(2), ["b"])], (1, 1), [[1, 2], ["a", "b"]]),
        ([{"x": rows(1), "mask": None}, {"x": rows(2), "mask": None}], (1, 1), {"x": [1, 2], "mask": None}),
        # Parts of different sizes, at any depth.
        (
            [OrderedDict(of=({"name": ["a", "b"]}, rows(1, 2))), OrderedDict(of=({"name": ["c"]}, rows(3)))],
            (2, 1),
            {"of": [{"name": ["a", "b", "c"]}, [1, 2, 3]]},
        ),
        # The boxes of each sample, of which one part has as many as samples.
        (
            [{"boxes": [{"at": rows(1, 2)}, {"at": rows(3, 4)}]}, {"boxes": [{"at": rows(5)}, {"at": rows(6, 7, 8)}]}],
            (2, 2),
            {"boxes": [{"at": [1, 2]}, {"at": [3, 4]}, {"at": [5]}, {"at": [6, 7, 8]}]},
        ),
        # Other values are listed if they differ, and so are all of a batch whose size nobody knows.
        ([{"scale": 2, "of": [1, 2, 3]}, {"scale": 2, "of": [1, 5, 3]}], (2, 2), {"scale": 2, "of": [1, [2, 5], 3]}),
        ([{"name": ["a", "b"]}, {"name": ["c", "d"]}], (None, None), {"name": [["a", "c"], ["b", "d"]]}),
        ([{"name": ["a", "b"]}, {"name": ["c"]}], (None, None), {"name": [["a", "b"], ["c"]]}),
        ([{"a": 1}, {"b": 1}], (1, 1), [{"a": 1}, {"b": 1}]),
        ([None, None], (1, 1), None),
        # Parts that lack something, which others have.
        ([{"mask": None}, {"mask": rows(1, 2)}], (2, 2), {"mask": [None, [1, 2]]}),
        ([{"mask": rows(1, 2)}, {"mask": None}], (2, 2), {"mask": [[1, 2], None]}),
        ([{"mask": None}, {"mask": np.ones(2)}], (2, 2), {"mask": [None, [1, 1]]}),
    ],
)
def test_joins(batches: list[Any], sizes: tuple[int | None, ...], expected: Any) -> None:
    joined = join(batches, parts(*sizes))
    assert plain(joined) == expected
