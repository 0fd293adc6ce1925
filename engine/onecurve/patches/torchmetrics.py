"""Private names of torchmetrics 1.8: a metric's states are public, but not to set them, nor how they are reduced.

A `_ResultMetric` of Lightning is such a metric. (https://github.com/Lightning-AI/torchmetrics/blob/v1.8.2/src/torchmetrics/metric.py)
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor

COUNT = "_update_count"  # the name of the number of updates among the states
# Also of those since the last reset, by which `Running` finds the place in its window.
COUNTS = (COUNT, "_num_vals_seen")


def states_of(metric: Any) -> dict[str, Any]:
    """Return the states of a metric by name, tensors and lists of them, and its numbers of updates."""
    return counts(metric) | metric.metric_state


def counts(metric: Any) -> dict[str, int]:
    """Return the numbers of updates of a metric."""
    return {name: vars(metric)[name] for name in COUNTS if name in vars(metric)}


def set_states(metric: Any, states: Mapping[str, Any]) -> None:
    """Set states, or numbers of updates, without the hooks of `nn.Module`."""
    vars(metric).update(states)


class _Replacement:
    """A function in the place of a method of a metric. A copy of the metric has it too, a pickle the method itself."""

    def __init__(self, metric: Any, name: str, function: Callable[..., Any]) -> None:
        self.metric, self.name, self.function = metric, name, function

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(self.metric, *args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Replacement":
        return _Replacement(deepcopy(self.metric, memo), self.name, self.function)

    def __reduce__(self) -> Any:
        return getattr, (self.metric, self.name)


def replace_methods(metric: Any, **functions: Callable[..., Any] | None) -> None:
    """Let functions of the metric take the place of its methods; None for the method itself."""
    for name, function in functions.items():
        vars(metric).pop(name, None)
        if function is not None:
            vars(metric)[name] = _Replacement(metric, name, function)


def replace_sync(metric: Any, function: Callable[..., None] | None) -> None:
    """Let a function of the metric set the state of all ranks, or None torchmetrics, which does so in `_sync_dist`."""
    replace_methods(metric, _sync_dist=function)


def default_states(metric: Any) -> dict[str, Any]:
    """Return the states that `reset` sets."""
    return metric._defaults


def reductions(metric: Any) -> dict[str, Callable[..., Any] | None]:
    """Return what reduces each state over ranks, if anything does."""
    return metric._reductions


def has_value(metric: Any) -> bool:
    """Return whether `compute` would return a value that it has computed before."""
    return metric._computed is not None


def forget_value(metric: Any) -> None:
    """Let `compute` compute again, after a change of the states that it does not notice."""
    metric._computed = None


def add_states(metric: Any, states: Mapping[str, Any]) -> None:
    """Add states to those of a metric, as its reductions say."""
    metric._reduce_states(states)


def step_value(metric: Any) -> Any:
    """Return the value of the batch of the latest `forward`, which is what Lightning logs of a step."""
    return metric._forward_cache


def set_step_value(metric: Any, value: Tensor) -> None:
    """Replace the value of the batch."""
    metric._forward_cache = value
