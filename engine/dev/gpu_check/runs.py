"""Runs of this project inside a case, and the comparison of two of them."""

import math
from statistics import median
from typing import Any

import torch

from engine.dev.gpu_check.case import Session, expect
from onecurve import compose, train
from onecurve.run.result import Result

SHORT_PARITY = [  # eight steps in float64, past the end of an epoch
    "experiment=parity",
    "data.source.train_size=100",
    "data.source.test_size=25",
    "data.batch_size=16",
    "trainer.max_steps=8",
]
TINY = ["data.source.train_size=400", "data.source.test_size=90", "data.batch_size=32", "trainer.log_every_n_steps=1"]
TOLERANCE = 1e-9  # relative, in float64


def overrides(session: Session, name: str, *own: str, devices: object = 1) -> list[str]:
    """Return the command line of a run on synthetic shapes in the folder `name`, whose images all cases share."""
    place = [f"run_dir={session.folder / name}", f"data.root={session.folder.parent / 'data'}"]
    hardware = [f"trainer.accelerator={session.accelerator}", f"trainer.devices={devices}".replace(" ", "")]
    return ["data=shapes", "logger=none", "trainer.enable_progress_bar=false", *own, *hardware, *place]


def run(session: Session, name: str, *own: str, devices: object = 1) -> Result:
    """Train on synthetic shapes; every loss must be finite."""
    result = train(compose(*overrides(session, name, *own, devices=devices)))
    expect(all(map(math.isfinite, column(result, "train/loss"))), "a loss is not finite")
    return result


def column(result: Result, name: str) -> list[float]:
    """Return the values of a metric at the log points that have it."""
    return [row[name] for row in result.history if name in row]


def middle(result: Result, name: str) -> float:
    """Return the median of a metric over the log points."""
    values = column(result, name)
    expect(bool(values), f"metrics.csv has no {name}")
    return median(values)


def expect_equal(one: Result, other: Result) -> str:
    """Check that losses, weights and buffers of two runs agree; return the largest relative difference."""
    found = _difference(one, other)
    expect(found <= TOLERANCE, f"relative difference {found:.1e}, at most {TOLERANCE:.0e} expected")
    return f"{found:.0e}"


def _difference(one: Result, other: Result) -> float:
    pairs = zip(column(one, "train/loss"), column(other, "train/loss"), strict=True)
    losses = [abs(a - b) / abs(b) for a, b in pairs]
    expect(bool(losses), "metrics.csv has no train/loss")
    states = [checkpoint(result)["state_dict"] for result in (one, other)]
    expect(states[0].keys() == states[1].keys(), "the checkpoints have different tensors")
    weights = [_relative(tensor, states[1][name]) for name, tensor in states[0].items()]
    return float(torch.tensor(losses + weights).max())  # NaN if one is


def checkpoint(result: Result) -> dict[str, Any]:
    """Return the content of the last checkpoint, on the CPU."""
    return torch.load(result.folder / "checkpoints" / "last.ckpt", map_location="cpu", weights_only=True)


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm().clamp_min(1e-300)) if not torch.equal(a, b) else 0.0
