"""Whether runs of one experiment have one curve: a wrong machine, driver or library makes them part.

In float64 the losses agree to 1e-9, or to 1e-5 if torchmetrics have averaged them in float32. Training amplifies the
rounding of float32, tenfold per step or more, until two runs differ as two seeds do (docs/how-it-works.md has numbers).
So their first step must agree tightly, and a later one loosely. Lower precisions begin looser, as does float32 on a
GPU, whose convolutions round to TF32.

Runs with `bit_exact=true` have equal bits, unless what else changes them differs: their `numerics`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onecurve.extras.report.run_folder import Curve, Floats, RunFolder
from onecurve.network.precision import dtype_name, is_double

_METRIC = "train/loss"
_OF_MACHINE = ("throughput/", "ranks/")  # metrics of speed and memory
# Relative: at the first step, and at most.
_TIGHT, _LOGGED_IN_FLOAT32, _FLOAT32, _LOW = (1e-9, 1e-9), (1e-5, 1e-5), (1e-5, 0.5), (1e-2, 0.5)


class Verdict(NamedTuple):
    """A sentence about the runs of one experiment, and whether they part."""

    sentence: str
    parts: bool


def difference(curve: Curve, first: Curve) -> Curve:
    """Return the relative difference of a curve from the first one, at the steps that both have; two nan are equal."""
    steps, values, others = _at_common_steps(curve, first)
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = np.abs(values - others) / np.abs(others)
    are_equal = (values == others) | (np.isnan(values) & np.isnan(others))
    return Curve(steps, np.where(are_equal, 0.0, gaps))


def _at_common_steps(curve: Curve, first: Curve) -> tuple[Floats, Floats, Floats]:
    """Return the steps that both curves have, and the values of each."""
    steps, ours, theirs = np.intersect1d(curve.steps, first.steps, return_indices=True)
    return steps, curve.values[ours], first.values[theirs]


def shared_metrics(runs: Sequence[RunFolder]) -> list[str]:
    """Return the metrics that all runs have logged, but those of speed: the loss of training, then other losses."""
    shared = set.intersection(*({*run.curves} for run in runs)) - {"epoch", "lr"}
    lengths = {name: len(runs[0].curves[name].steps) for name in shared if not name.startswith(_OF_MACHINE)}
    return sorted(lengths, key=lambda name: (name != _METRIC, "loss" not in name, -lengths[name], name))


def verdicts(runs: Sequence[RunFolder], names: Sequence[str]) -> list[Verdict]:
    """Compare the runs of each experiment with the first of them; an experiment with one run has no verdict."""
    groups: dict[str, list[tuple[RunFolder, str]]] = {}
    for run, name in zip(runs, names, strict=True):
        if run.experiment:
            groups.setdefault(run.experiment, []).append((run, name))
    found = []
    for first, *others in groups.values():
        for run, name in others:
            is_bit_exact = run.config.get("bit_exact") is True
            if verdict := (_compare_bits if is_bit_exact else _compare)(run, name, *first):
                sentence = f"Experiment {run.experiment}: {verdict.sentence}{_last_steps(run, name, *first)}"
                found.append(Verdict(sentence, verdict.parts))
    return found


def _last_steps(run: RunFolder, name: str, first: RunFolder, first_name: str) -> str:
    """Return the last step of each run, if one is longer than the other."""
    shared = run.curves.keys() & first.curves.keys()
    end, first_end = (max((one.curves[metric].steps[-1] for metric in shared), default=0.0) for one in (run, first))
    return f" {name} has logged up to step {end:.0f}, {first_name} to {first_end:.0f}." if end != first_end else ""


def _compare_bits(run: RunFolder, name: str, first: RunFolder, first_name: str) -> Verdict:
    """Compare all values that both runs have logged."""
    count, differences = 0, list[tuple[float, str, float, float]]()
    for metric in sorted(run.curves.keys() & first.curves.keys()):
        if metric.startswith(_OF_MACHINE):
            continue
        steps, values, others = _at_common_steps(run.curves[metric], first.curves[metric])
        count += len(steps)
        for at in np.flatnonzero(difference(run.curves[metric], first.curves[metric]).values)[:1]:
            differences.append((steps[at], metric, float(values[at]), float(others[at])))
    if not count:
        return Verdict(f"{name} and {first_name} have logged nothing at the same step.", False)
    if not differences:
        return Verdict(f"{name} and {first_name} are equal to the last bit ({count} values).", False)
    step, metric, value, other = min(differences)
    measured = f"{metric} is {value!r} and {other!r}, which differ from digit {_first_digit(value, other)} on"
    sentence = f"{name} parts from {first_name} at step {step:.0f}: {measured}."
    changed = {key for key in run.numerics | first.numerics if run.numerics.get(key) != first.numerics.get(key)}
    if not changed:
        return Verdict(sentence, True)
    causes = [f"{key} ({run.numerics.get(key)}, {first.numerics.get(key)})" for key in sorted(changed)]
    rounded = _compare(run, name, first, first_name)
    is_beyond_rounding = rounded is not None and rounded.parts
    return Verdict(f"{sentence} They differ in {', '.join(causes)}, which changes bits.", is_beyond_rounding)


def _first_digit(a: float, b: float) -> int:
    """Return the number of the first significant digit in which two numbers differ, counted from one."""
    texts = [f"{value:+.16e}" for value in (a, b)]
    if texts[0].partition("e")[2] != texts[1].partition("e")[2]:
        return 1
    equal = [x == y for x, y in zip(*texts, strict=False)]
    return max(1, equal.index(False) - 1)  # the sign and the point are no digits


def _compare(run: RunFolder, name: str, first: RunFolder, first_name: str) -> Verdict | None:
    """Compare the loss of training, in float64 the other losses too; None if the runs have nothing in common.

    Without a loss, the metric that has the most values stands for it.
    """
    shared = shared_metrics([run, first])
    losses = [metric for metric in shared if "loss" in metric] or shared[:1]
    if not is_double(run.config.get("trainer.precision")):
        losses = losses[:1]  # rounding makes the others of an evaluation differ by any amount
    found = [_compare_loss(loss, run, name, first, first_name) for loss in losses]
    return next((verdict for verdict in found if verdict.parts), found[0] if found else None)


def _compare_loss(metric: str, run: RunFolder, name: str, first: RunFolder, first_name: str) -> Verdict:
    gap = difference(run.curves[metric], first.curves[metric])
    begin, most = _bounds(metric, run, first)
    allowed = np.minimum(begin * 10.0 ** np.minimum(gap.steps, 9), most)
    beyond = np.flatnonzero(~(gap.values <= allowed))  # nan is beyond
    if not len(gap.steps):
        return Verdict(f"{name} and {first_name} have logged {metric} at no common step.", False)
    if not len(beyond):
        largest = f"differ by at most {np.max(gap.values):.1e}, relative, as rounding that training amplifies explains"
        measured = f"{len(gap.steps)} log points of {metric} {largest if np.any(gap.values) else 'are equal'}"
        return Verdict(f"{name} and {first_name} have one curve: {measured}.", False)
    at = beyond[0]
    sentence = f"{name} parts from {first_name} at step {gap.steps[at]:.0f}"
    if not np.isfinite(gap.values[at]):
        _, values, others = _at_common_steps(run.curves[metric], first.curves[metric])
        return Verdict(f"{sentence}: {metric} is {values[at]:.4g} and {others[at]:.4g}.", True)
    sentence += f": {metric} differs by {gap.values[at]:.1e}, relative; rounding explains {allowed[at]:.1e}."
    if run.world_size != first.world_size:
        sentence += (
            f" A module of your own logs {metric} with sync_dist=True, or it is rank zero's; a mean over anything but "
            "samples, such as tokens or weighted classes, and padding without a mask, need bit_exact=true."
        )
    return Verdict(sentence, True)


def _bounds(metric: str, *runs: RunFolder) -> tuple[float, float]:
    """Return the largest difference by rounding at the first step, and at any step."""
    precision = runs[0].config.get("trainer.precision")  # None in a script that leaves it out
    if is_double(precision):
        logged = [run.curves[metric].finite() for run in runs]
        is_rounded = all(np.array_equal(values, values.astype(np.float32)) for values in logged)
        return _LOGGED_IN_FLOAT32 if is_rounded else _TIGHT
    is_on_cpu = all(run.started.get("device") == "cpu" for run in runs)
    return _FLOAT32 if dtype_name(precision) == "float32" and is_on_cpu else _LOW
