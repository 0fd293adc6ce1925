"""From Hydra's sweep syntax to Optuna's distributions."""

from collections.abc import Iterable
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution


def search_space(overrides: Iterable[Override]) -> tuple[dict[str, BaseDistribution], list[str]]:
    """What Optuna chooses, by option, and the overrides that are the same for all trials."""
    space: dict[str, BaseDistribution] = {}
    fixed = []
    for override in overrides:
        name = override.get_key_element()
        if override.is_sweep_override():
            space[name] = _distribution(override)
        else:
            fixed.append(f"{name}={override.get_value_element_as_str()}" if not override.is_delete() else name)
    return space, fixed


def _distribution(override: Override) -> BaseDistribution:
    """`interval(a,b)`, `int(interval(a,b))`, `tag(log, ...)` of them; `range(a,b,step)`; or choices."""
    value: Any = override.value()
    if not isinstance(value, IntervalSweep | RangeSweep):
        return CategoricalDistribution(list(override.sweep_string_iterator()))
    options: dict[str, Any]
    if isinstance(value, IntervalSweep):
        low, high, options = value.start, value.end, {"log": "log" in value.tags}
    else:
        low, *_, high = value.range()
        options = {"step": value.step}
    kind: Any = IntDistribution if isinstance(low, int) and isinstance(high, int) else FloatDistribution
    return kind(low, high, **options)
