"""Learning-rate schedules: the factor on the learning rate as a function of (step, steps of the whole run)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer

Schedule = Callable[[int, int], float]  # (step, steps of the whole run) -> factor on the learning rate


def unwrap_partial(schedule: Schedule) -> Schedule:
    """Replace Hydra's wrapper with a plain partial; the wrapper checks its target at every call: 60 microseconds."""
    return partial(schedule.func, *schedule.args, **schedule.keywords) if isinstance(schedule, partial) else schedule


def lr_multiplier(schedule: Schedule, group: dict[str, Any], step: int, steps: int) -> float:
    """Return the factor on a group's learning rate at a step of a run of so many.

    A group with a `schedule_fraction` has its whole schedule in that fraction of the run, and rests afterwards.
    """
    own = steps * group.get("schedule_fraction", 1.0)
    return schedule(step, round(own)) if own == steps or step < own else 0.0


def lr_lambdas(optimizer: Optimizer, factor: Callable[[dict[str, Any], int], float]) -> list[Callable[[int], float]]:
    """Return one function per parameter group, from the step to the factor on its learning rate."""

    def of(group: dict[str, Any]) -> Callable[[int], float]:
        return lambda step: factor(group, step)

    return [of(group) for group in optimizer.param_groups]


def cosine(step: int, steps: int, warmup: float = 0.05) -> float:
    """Linear warm-up over the share `warmup` of the run, then half a cosine to zero (Loshchilov and Hutter, 2016)."""
    ramp = max(1.0, warmup * steps)
    if step < ramp:
        return (step + 1) / (ramp + 1)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - ramp) / max(1.0, steps - ramp))))


def one_cycle(step: int, steps: int, warmup: float = 0.25, start: float = 0.1) -> float:
    """Straight up from `start` to 1 over the share `warmup` of the run, straight down to zero (Smith, 2018)."""
    top = warmup * steps
    if step < top:
        return start + (1 - start) * step / top
    return max(0.0, (steps - step) / max(1.0, steps - top))


def constant(step: int, steps: int, warmup: float = 0.0) -> float:
    """Linear warm-up over the share `warmup` of the run, then no change."""
    return min(1.0, (step + 1) / (warmup * steps + 1))


def multi_step(step: int, steps: int, milestones: Sequence[float], factor: float = 0.2, warmup: float = 0.0) -> float:
    """Linear warm-up, then less by `factor` at each of the milestones, which are shares of the run."""
    passed = sum(step >= milestone * steps for milestone in milestones)
    return constant(step, steps, warmup) * factor**passed
