"""Comparison of two runs: losses, weights, buffers and the optimizer's moments."""

import csv
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.runs import Record

TOLERANCE = 1e-9  # relative, in float64


def relative(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference, relative to the norm of `b`."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300)) if not torch.equal(a, b) else 0.0


def distances(run: Record, reference: Record) -> tuple[float, float]:
    """Return the largest relative difference of any step's loss, and of any final weight or buffer."""
    losses = max((abs(a - b) / abs(b) for a, b in zip(run.losses, reference.losses, strict=True)), default=0.0)
    # `run.final` is the state of a stage, or of the network.
    weights = max(relative(tensor, reference.final[name]) for name, tensor in run.final.items())
    return losses, weights


def check_resumed(records: list[Record], reference: Record, done: int) -> None:
    """Check that ranks resumed after `done` steps have the reference's remaining losses and its final state."""
    for resumed in records:
        for a, b in zip(resumed.losses, reference.losses[done:], strict=True):
            assert a == pytest.approx(b, rel=TOLERANCE)
        assert max(relative(resumed.final[name], tensor) for name, tensor in reference.final.items()) < TOLERANCE
        assert resumed.optimizer.keys() == reference.optimizer.keys()
        moments = [relative(resumed.optimizer[name], tensor) for name, tensor in reference.optimizer.items()]
        assert max(moments, default=0.0) < 10 * TOLERANCE


def check_replicas(records: list[Record]) -> None:
    """Check that tensors on several ranks are bit-identical."""
    for record in records:
        for other in records:
            shared = record.final.keys() & other.final.keys()
            assert all(torch.equal(record.final[name], other.final[name]) for name in shared), "replicas differ"


def check_last_checkpoints(folder: Path, other: Path, tolerance: float = TOLERANCE) -> None:
    """Check that the last checkpoints of two run folders hold the same step and the same weights."""
    ours, theirs = (torch.load(place / "checkpoints" / "last.ckpt") for place in (folder, other))
    assert ours["global_step"] == theirs["global_step"]
    weights = theirs["state_dict"].items()
    assert max(relative(ours["state_dict"][name], tensor) for name, tensor in weights) <= tolerance


def read_rows(folder: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv, keyed by column."""
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def check_same_rows(folder: Path, other: Path) -> None:
    """Check that two runs logged the same metrics at the same steps, except speed and memory."""
    ours, theirs = read_rows(folder), read_rows(other)
    for row, reference in zip(ours, theirs, strict=True):
        names = [name for name in row.keys() | reference.keys() if not name.startswith(("throughput/", "ranks/"))]
        for name in names:
            value, expected = row.get(name) or "nan", reference.get(name) or "nan"
            assert float(value) == pytest.approx(float(expected), rel=TOLERANCE, nan_ok=True), (row["step"], name)
