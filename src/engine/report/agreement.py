"""Whether runs of one experiment have one curve: a wrong machine, driver or library makes them part.

In float64 the losses agree to 1e-9, or to 1e-5 if torchmetrics have averaged them in float32. Training amplifies the
rounding of float32, tenfold per step or more, until two runs differ as two seeds do (docs/how-it-works.md has numbers).
So their first step must agree tightly, and a later one loosely. Lower precisions begin looser, as does float32 on a
GPU, whose convolutions round to TF32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from src.engine.report.run_folder import Curve, RunFolder

_METRIC = "train/loss"
# Relative: at the first step, and at most.
_TIGHT, _LOGGED_IN_FLOAT32, _FLOAT32, _LOW = (1e-9, 1e-9), (1e-5, 1e-5), (1e-5, 0.5), (1e-2, 0.5)


class Verdict(NamedTuple):
    """A sentence about the runs of one experiment, and whether they part."""

    sentence: str
    parts: bool


def difference(curve: Curve, first: Curve) -> Curve:
    """Return the relative difference of a curve from the first one, at the steps that both have."""
    steps, ours, theirs = np.intersect1d(curve.steps, first.steps, return_indices=True)
    reference = first.values[theirs]
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = np.abs(curve.values[ours] - reference) / np.abs(reference)
    return Curve(steps, np.where(curve.values[ours] == reference, 0.0, gaps))


def verdicts(runs: Sequence[RunFolder], names: Sequence[str]) -> list[Verdict]:
    """Compare the runs of each experiment with the first of them; an experiment with one run has no verdict."""
    groups: dict[str, list[tuple[RunFolder, str]]] = {}
    for run, name in zip(runs, names, strict=True):
        if run.experiment and _METRIC in run.curves:
            groups.setdefault(run.experiment, []).append((run, name))
    return [_compare(*other, *first) for first, *others in groups.values() for other in others]


def _compare(run: RunFolder, name: str, first: RunFolder, first_name: str) -> Verdict:
    gap = difference(run.curves[_METRIC], first.curves[_METRIC])
    begin, most = _bounds(run, first)
    allowed = np.minimum(begin * 10.0 ** np.minimum(gap.steps, 9), most)
    beyond = np.flatnonzero(~(gap.values <= allowed))  # nan is beyond
    experiment = f"Experiment {run.experiment}:"
    if not len(beyond):
        count = f"{len(gap.steps)} log points"
        return Verdict(f"{experiment} {name} and {first_name} have one curve, up to rounding ({count}).", False)
    at = beyond[0]
    measured = f"{_METRIC} differs by {gap.values[at]:.1e}, relative; rounding explains {allowed[at]:.1e}"
    sentence = f"{experiment} {name} parts from {first_name} at step {gap.steps[at]:.0f}: {measured}."
    if run.world_size != first.world_size:
        sentence += f" A module of your own logs {_METRIC} with sync_dist=True: without it, the value is rank zero's."
    return Verdict(sentence, True)


def _bounds(*runs: RunFolder) -> tuple[float, float]:
    """Return the largest difference by rounding at the first step, and at any step."""
    precision = str(runs[0].config.get("trainer.precision"))
    if precision.startswith("64"):
        logged = [run.curves[_METRIC].finite() for run in runs]
        is_rounded = all(np.array_equal(values, values.astype(np.float32)) for values in logged)
        return _LOGGED_IN_FLOAT32 if is_rounded else _TIGHT
    is_on_cpu = all(run.started.get("device") == "cpu" for run in runs)
    return _FLOAT32 if precision.startswith("32") and is_on_cpu else _LOW
