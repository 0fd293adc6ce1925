"""Conversion of Hydra's sweep syntax to Optuna's distributions."""

from collections.abc import Iterable, Mapping
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution


def search_space(overrides: Iterable[Override]) -> tuple[dict[str, BaseDistribution], list[str]]:
    """Return the distribution of each option that Optuna chooses, and the overrides that all trials share."""
    space: dict[str, BaseDistribution] = {}
    fixed = []
    for override in overrides:
        name = override.get_key_element()
        if override.is_sweep_override():
            space[name] = _distribution(override)
        else:
            fixed.append(name if override.is_delete() else f"{name}={override.get_value_element_as_str()}")
    return space, fixed


def with_params(params: Mapping[str, Any], arguments: Iterable[str]) -> list[str]:
    """Return the overrides of a sweep: those of `hydra.sweeper.params`, unless the command line sets the option too."""
    arguments = list(arguments)
    given = {argument.partition("=")[0] for argument in arguments}
    return [*(f"{name}={value}" for name, value in params.items() if name not in given), *arguments]


def _distribution(override: Override) -> BaseDistribution:
    """Return the distribution of one override.

    It can be `interval(a,b)` or `int(interval(a,b))`, each also in `tag(log, ...)`, `range(a,b,step)`, or a choice.
    """
    value: Any = override.value()
    if not isinstance(value, IntervalSweep | RangeSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    options: dict[str, Any]
    if isinstance(value, IntervalSweep):
        low, high, options = value.start, value.end, {"log": "log" in value.tags}
    else:
        points = list(value.range())
        low, high, options = points[0], points[-1], {"step": value.step}
    kind: Any = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
    return kind(low, high, **options)
