"""Schedulers: learning-rate schedules of this template, and any class of torch.optim.lr_scheduler.

A schedule gives the factor on the learning rate as a function of (step, steps of the full run).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from onecurve.errors import UserError, check_choice

Schedule = Callable[[int, int], float]  # (step, steps of the full run) -> factor on the learning rate


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


@dataclass
class TorchSchedule:
    """A scheduler of torch, and when it takes a step.

    Args:
        scheduler: builds the scheduler for an optimizer.
        interval: `epoch` or `step`: the optimizer step.
        frequency: intervals between two steps of the scheduler; each epoch counts its optimizer steps from one.
        monitor: metric for ReduceLROnPlateau.
    """

    scheduler: partial[LRScheduler]
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None

    def __post_init__(self) -> None:
        check_choice("scheduler.interval", self.interval, ("epoch", "step"))
        if self.frequency < 1:
            raise UserError(f"scheduler.frequency={self.frequency}: give an integer of at least one")


def lr_multiplier(schedule: Schedule, group: dict[str, Any], step: int, steps: int) -> float:
    """Return the factor on a group's learning rate at a step of a run with `steps` steps.

    A group with a `schedule_fraction` completes its schedule in that fraction of the run; then its factor is zero.
    """
    group_steps = steps * group.get("schedule_fraction", 1.0)
    is_complete = group_steps != steps and step >= group_steps
    return 0.0 if is_complete else schedule(step, round(group_steps))


def scheduler_config(optimizer: Optimizer, schedule: Schedule | TorchSchedule, steps: int) -> dict[str, Any]:
    """Return the scheduler for a run of so many steps, in the form of Lightning's `configure_optimizers`."""
    if not isinstance(schedule, TorchSchedule):
        is_own = isinstance(schedule, partial) and schedule.func.__module__ == __name__
        warmup = schedule.keywords.get("warmup", 0) if is_own else 0
        if not 0 <= warmup <= 1:
            raise UserError(f"scheduler.warmup={warmup}: give the fraction of the run, between 0 and 1")
        lambdas = [_lr_lambda(schedule, group, steps) for group in optimizer.param_groups]
        return {"scheduler": LambdaLR(optimizer, lambdas), "interval": "step"}
    if any(group.get("schedule_fraction", 1.0) != 1.0 for group in optimizer.param_groups):
        raise UserError(
            "optimizer.whitening_fraction needs a schedule of conf/scheduler: set it to 1.0, or use one_cycle"
        )
    try:
        scheduler = schedule.scheduler(optimizer)
    except (TypeError, ValueError) as error:
        raise UserError(f"scheduler={schedule.scheduler.func.__name__}: {error}") from error
    return vars(schedule) | {"scheduler": scheduler}


def _lr_lambda(schedule: Schedule, group: dict[str, Any], steps: int) -> Callable[[int], float]:
    if isinstance(schedule, partial):  # Hydra's takes 60 microseconds per call to check its target
        schedule = partial(schedule.func, *schedule.args, **schedule.keywords)
    # A function, because LambdaLR saves the attributes of any other callable, such as a partial, in checkpoints.
    return lambda step: lr_multiplier(schedule, group, step, steps)


def keep_configured_rates(checkpoint: dict[str, Any], configured: Any, schedule: Any, steps: int) -> None:
    """Let a continued run use the configured hyper-parameters instead of those in its checkpoint.

    The checkpoint changes in place. `configured` is what the module's `configure_optimizers` returns now. A scheduler
    of torch may have changed any of them, so that those of the checkpoint stay.
    """
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    saved_kind = checkpoint.get("scheduler")
    if saved_kind != type(scheduler).__name__:
        raise UserError(f"ckpt_path is a run with another kind of `scheduler` ({saved_kind}): set it as in that run")
    if isinstance(schedule, TorchSchedule):
        return
    step, saved = checkpoint["global_step"], checkpoint["optimizer_states"][0]
    override_hyperparameters(saved, optimizer, lambda group: lr_multiplier(schedule, group, step, steps))
    # The scheduler takes the learning rates from the configuration, not from the checkpoint.
    for key in ("base_lrs", "_last_lr"):
        checkpoint["lr_schedulers"][0].pop(key)


def override_hyperparameters(
    saved: dict[str, Any], optimizer: Optimizer, multiplier: Callable[[dict[str, Any]], float]
) -> None:
    """Replace the hyper-parameters in a saved optimizer state, in place, by those of `optimizer`.

    `multiplier` maps a parameter group to the factor on its learning rate at the step of the checkpoint.
    """
    saved_groups, own_groups = saved["param_groups"], optimizer.param_groups
    if [group.keys() for group in saved_groups] != [group.keys() for group in own_groups]:
        raise UserError("ckpt_path is a run with another `optimizer`: set it as in that run")
    for saved_group, own_group in zip(saved_groups, own_groups, strict=True):
        saved_group |= {key: value for key, value in own_group.items() if key not in ("params", "param_names")}
        saved_group["lr"] = own_group.get("initial_lr", own_group["lr"]) * multiplier(own_group)
