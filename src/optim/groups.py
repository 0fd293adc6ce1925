"""Build the optimizer: no weight decay for vectors, and a learning rate scaled with the batch size."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from src.utils.errors import UserError, nearest

_RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda ratio: 1.0}


def scaling_factor(rule: str, batch_size: int, reference: int) -> float:
    """What the learning rate, stated for a batch of `reference` samples, is multiplied by for `batch_size`.

    `linear` is Goyal et al., "Accurate, large minibatch SGD" (2017); `sqrt` Krizhevsky, "One weird trick" (2014),
    which suits adaptive optimizers.

    Raises:
        UserError: if there is no such rule.
    """
    if rule not in _RULES:
        raise UserError(f"module.lr_scaling={rule} is not a rule: {nearest(rule, _RULES)}")
    return _RULES[rule](batch_size / reference)


def build_optimizer(net: nn.Module, factory: partial[Any], lr_factor: float, prefix: str) -> Optimizer:
    """Build the optimizer over two groups, the second (biases, norms: all vectors) without weight decay.

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


def override_hyperparameters(
    saved: dict[str, Any], optimizer: Optimizer, multiplier: Callable[[dict[str, Any]], float]
) -> None:
    """Put the hyper-parameters of `optimizer` into a saved state.

    Args:
        saved: the optimizer's state in a checkpoint, changed in place.
        optimizer: as the configuration makes it.
        multiplier: the factor on a group's learning rate at the step of the checkpoint.

    Raises:
        UserError: if the state is of an optimizer of another kind.
    """
    groups = saved["param_groups"], optimizer.param_groups
    if [group.keys() for group in groups[0]] != [group.keys() for group in groups[1]]:
        raise UserError("ckpt_path is of a run with another `optimizer`: leave it as that run had it")
    for old, new in zip(*groups, strict=True):
        old.update({key: value for key, value in new.items() if key not in ("params", "param_names")})
        old["lr"] = new.get("initial_lr", new["lr"]) * multiplier(new)
