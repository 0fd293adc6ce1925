"""Muon: the momentum of each filter bank or matrix, made orthogonal, is the step; SGD for everything else.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024; kellerjordan.github.io/posts/muon), with
the options of github.com/KellerJordan/cifar10-airbench. torch.optim.Muon takes matrices only, and only these.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from src.optim.optimizer_state import shard_like, to_full_tensor


def muon(
    params: list[dict[str, Any]],
    lr: float,
    momentum: float = 0.95,
    head_scale: float = 5.0,
    vector_scale: float = 5.0,
    vector_momentum: float = 0.9,
    weight_decay: float = 0.0,
    unit_filters: bool = False,
    whitening_fraction: float = 1.0,
    iterations: int = 5,
) -> Optimizer:
    """The optimizer over named parameters, in groups by their role.

    Args:
        params: groups of (name, parameter).
        lr: of the hidden layers' filters and matrices: the size of a step in every direction.
        momentum: of these, as `vector_momentum` is of the others, both Nesterov's.
        head_scale, vector_scale: what the learning rates of SGD are in units of `lr`, for the weights of the last
            block, which is called `head`, and for biases and whatever else is no matrix.
        weight_decay: share of a weight that a step takes away, as long as the schedule is at its top.
        unit_filters: instead, scale filters before each step to a norm of one on average.
        whitening_fraction: share of the run over which the learning rate of a whitening layer's bias falls to zero.
        iterations: of Newton and Schulz.
    """
    named = [pair for group in params for pair in group["params"]]
    roles: dict[str, list[tuple[str, Tensor]]] = {"filters": [], "head": [], "vectors": [], "whitening": []}
    for name, parameter in named:
        roles[_role(name, parameter)].append((name, parameter))
    rates = {"filters": lr, "head": lr * head_scale, "vectors": lr * vector_scale, "whitening": lr * vector_scale}
    decays = {role: weight_decay / rate if rate else 0.0 for role, rate in rates.items()}
    decays |= {"filters": 0.0} if unit_filters else {}
    groups = [
        {
            "name": role,
            "params": members,
            "lr": rates[role],
            "weight_decay": decays[role],
            "schedule_fraction": whitening_fraction if role == "whitening" else 1.0,
            "orthogonal": role == "filters",
            "momentum": momentum if role == "filters" else vector_momentum,
            "unit_filters": unit_filters,
            "iterations": iterations,
        }
        for role, members in roles.items()
    ]
    return Muon([group for group in groups if group["params"]])


def _role(name: str, parameter: Tensor) -> str:
    blocks = name.split(".")
    if "whitening" in blocks:
        return "whitening"
    if "head" in blocks and parameter.ndim > 1:
        return "head"
    return "filters" if parameter.ndim in (2, 4) else "vectors"


class Muon(Optimizer):
    """Steps every group by SGD with Nesterov's momentum, and those that are `orthogonal` by Muon.

    A sharded tensor's update is computed whole on each rank, of which it keeps its shard.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, orthogonal = self.state[parameter], group["orthogonal"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient = parameter.grad
        assert gradient is not None
        if not orthogonal:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        update = gradient.add(state["momentum_buffer"].mul_(group["momentum"]).add_(gradient), alpha=group["momentum"])
        if orthogonal:
            update = shard_like(orthogonalized(to_full_tensor(update), group["iterations"]), parameter)
            if group["unit_filters"]:
                parameter.mul_(len(parameter) ** 0.5 / parameter.norm())
            else:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])


def orthogonalized(update: Tensor, iterations: int) -> Tensor:
    """The (outputs, ...) tensor with singular values, as a matrix of its outputs' rows, of about one.

    By a polynomial of fifth degree, iterated, whose coefficients are Jordan's: it gets small values up quickly, and
    leaves all between 0.7 and 1.2 or so. In bfloat16, which does for that, but where all is kept in float64.
    """
    matrix = update.flatten(1).to(torch.float64 if update.dtype == torch.float64 else torch.bfloat16)
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if tall else x).reshape(update.shape).to(update.dtype)
