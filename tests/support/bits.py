"""Comparison of two runs to the last bit."""

from pathlib import Path

import torch
from torch import Tensor

from tests.support.comparison import read_rows
from tests.support.runs import Record

# Before the options of a run: the experiment `parity` in float32, with as many virtual ranks as its batch has pairs.
EXACT = ["experiment=parity", "bit_exact=true", "virtual_ranks=8", "trainer.precision=32-true"]
_OF_THIS_RUN = ("throughput/", "ranks/")  # speed and memory


def have_equal_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and bits; NaN counts as a value."""
    is_alike = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return is_alike and ours.flatten().view(torch.uint8).equal(theirs.flatten().view(torch.uint8))


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Return the text of metrics.csv, by row and column, without what depends on the machine."""
    return [
        {name: value for name, value in row.items() if value and not name.startswith(_OF_THIS_RUN)}
        for row in read_rows(folder)
    ]


def check_equal_bits(records: list[Record], reference: Record) -> None:
    """Check that the ranks of a run have logged and learned what those of the reference have.

    Args:
        records: those of all ranks, of which each may have a part of the weights and moments.
        reference: the record of one process.
    """
    ours, theirs = rows_of(records[0].file.parent), rows_of(reference.file.parent)
    assert len(ours) == len(theirs), "the runs have different numbers of rows"
    for row, other in zip(ours, theirs, strict=True):
        for name in row.keys() | other.keys():
            assert row.get(name) == other.get(name), f"{name} of step {row['step']}: {row.get(name)}, {other.get(name)}"
    for kind in ("final", "optimizer"):
        expected, names = getattr(reference, kind), set()
        for record in records:
            for name, tensor in getattr(record, kind).items():
                names.add(name)
                assert have_equal_bits(tensor, expected[name]), f"{kind} of {name}"
        assert names == expected.keys()
