"""How the optimiser's numbers follow from the configuration: groups, learning-rate scaling, schedules."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from src.errors import UserError, nearest

Schedule = Callable[[int, int], float]  # (step, steps of the whole run) -> factor on the learning rate

_RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda ratio: 1.0}


def plain(schedule: Schedule) -> Schedule:
    """The same without what Hydra wraps around it, which checks its target anew at every call: 60 microseconds."""
    return partial(schedule.func, *schedule.args, **schedule.keywords) if isinstance(schedule, partial) else schedule


def scaling_factor(rule: str, batch_size: int, reference: int) -> float:
    """What the learning rate, stated for a batch of `reference` samples, is multiplied by for `batch_size`.

    `linear` is Goyal et al., "Accurate, large minibatch SGD" (2017); `sqrt` Krizhevsky, "One weird trick" (2014),
    which suits adaptive optimisers.

    Raises:
        UserError: if there is no such rule.
    """
    if rule not in _RULES:
        raise UserError(f"module.lr_scaling={rule} is not a rule: {nearest(rule, _RULES)}")
    return _RULES[rule](batch_size / reference)


def build_optimizer(net: nn.Module, factory: partial[Any], lr_factor: float, prefix: str) -> Optimizer:
    """Build the optimiser over two groups, the second (biases, norms: all vectors) without weight decay.

    The parameters are given by name, as `prefix` and their name in the network, which the state dict then holds
    as `param_names`: a checkpoint says itself which moments belong to which weights.

    Raises:
        UserError: if the learning rate is no such number.
    """
    lr = factory.keywords["lr"]
    if not isinstance(lr, int | float) or lr < 0:
        raise UserError(f"optimizer.lr={lr} is no learning rate: give a number of at least zero")
    named = [(f"{prefix}{name}", parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"name": "decay", "params": [(name, weight) for name, weight in named if weight.ndim > 1]},
        {
            "name": "no decay",
            "params": [(name, weight) for name, weight in named if weight.ndim <= 1],
            "weight_decay": 0.0,
        },
    ]
    return factory([group for group in groups if group["params"]], lr=lr * lr_factor)


def factor_at(schedule: Schedule, group: dict[str, Any], step: int, steps: int) -> float:
    """What is due of a group's learning rate; one with a share `until` has its whole schedule in that of the run."""
    own = steps * group.get("until", 1.0)
    return schedule(step, round(own)) if own == steps or step < own else 0.0


def per_group(optimizer: Optimizer, factor: Callable[[dict[str, Any], int], float]) -> list[Callable[[int], float]]:
    """The factor as a function of the step for each of the optimiser's groups."""

    def of(group: dict[str, Any]) -> Callable[[int], float]:
        return lambda step: factor(group, step)

    return [of(group) for group in optimizer.param_groups]


def adopt(saved: dict[str, Any], optimizer: Optimizer, factor: Callable[[dict[str, Any]], float]) -> None:
    """Put the hyper-parameters of `optimizer` into a saved state; of a group's learning rate, `factor` is due.

    Raises:
        UserError: if the state is of an optimiser of another kind.
    """
    groups = saved["param_groups"], optimizer.param_groups
    if [group.keys() for group in groups[0]] != [group.keys() for group in groups[1]]:
        raise UserError("ckpt_path is of a run with another `optimizer`: leave it as that run had it")
    for old, new in zip(*groups, strict=True):
        old.update({key: value for key, value in new.items() if key not in ("params", "param_names")})
        old["lr"] = new.get("initial_lr", new["lr"]) * factor(new)


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
