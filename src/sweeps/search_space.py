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
    """`interval(a,b)`, of whole numbers if both are; `tag(log, ...)` of it; `range(a,b,step)`; or choices."""
    value: Any = override.value()
    if isinstance(value, IntervalSweep):
        whole = isinstance(value.start, int) and isinstance(value.end, int)
        return (IntDistribution if whole else FloatDistribution)(value.start, value.end, log="log" in value.tags)  # type: ignore[arg-type]
    if isinstance(value, RangeSweep):
        numbers: list[Any] = list(value.range())
        whole = all(isinstance(number, int) for number in numbers)
        return (IntDistribution if whole else FloatDistribution)(numbers[0], numbers[-1], step=value.step)  # type: ignore[arg-type]
    return CategoricalDistribution(list(override.sweep_string_iterator()))
