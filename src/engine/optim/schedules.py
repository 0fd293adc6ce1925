"""Learning-rate schedules: the factor on the learning rate as a function of (step, steps of the full run)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

Schedule = Callable[[int, int], float]  # (step, steps of the full run) -> factor on the learning rate


def unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replace Hydra's wrapper with a plain partial; the wrapper takes 60 microseconds per call to check its target."""
    return partial(function.func, *function.args, **function.keywords) if isinstance(function, partial) else function


def lr_multiplier(schedule: Schedule, group: dict[str, Any], step: int, steps: int) -> float:
    """Return the factor on a group's learning rate at a step of a run with `steps` steps.

    A group with a `schedule_fraction` completes its schedule in that fraction of the run; then its factor is zero.
    """
    group_steps = steps * group.get("schedule_fraction", 1.0)
    is_complete = group_steps != steps and step >= group_steps
    return 0.0 if is_complete else schedule(step, round(group_steps))


def lr_lambdas(optimizer: Optimizer, factor: Callable[[dict[str, Any], int], float]) -> list[Callable[[int], float]]:
    """Return one function per parameter group; it maps the step to the factor on the group's learning rate."""

    # A function, because LambdaLR saves the attributes of any other callable, such as a partial, in checkpoints.
    def bind(group: dict[str, Any]) -> Callable[[int], float]:
        return lambda step: factor(group, step)

    return [bind(group) for group in optimizer.param_groups]


def cosine(step: int, steps: int, warmup: float = 0.05) -> float:
    """Linear warm-up in the fraction `warmup` of the run, then half a cosine to zero (Loshchilov and Hutter, 2016)."""
    warmup_steps = max(1.0, warmup * steps)
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1.0, steps - warmup_steps))
    return 0.5 * (1 + math.cos(math.pi * progress))


def one_cycle(step: int, steps: int, warmup: float = 0.25, start: float = 0.1) -> float:
    """Linear rise from `start` to 1 in the fraction `warmup` of the run, then linear decay to zero (Smith, 2018)."""
    warmup_steps = warmup * steps
    if step < warmup_steps:
        return start + (1 - start) * step / warmup_steps
    return max(0.0, (steps - step) / max(1.0, steps - warmup_steps))


def constant(step: int, steps: int, warmup: float = 0.0) -> float:
    """Linear warm-up in the fraction `warmup` of the run, then no change."""
    return min(1.0, (step + 1) / (warmup * steps + 1))


def multi_step(step: int, steps: int, milestones: Sequence[float], factor: float = 0.2, warmup: float = 0.0) -> float:
    """Linear warm-up, then multiplication by `factor` at each milestone, given as a fraction of the run."""
    passed = sum(step >= milestone * steps for milestone in milestones)
    return constant(step, steps, warmup) * factor**passed
