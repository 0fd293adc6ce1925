"""Muon for filters and matrices, whose step is their orthogonalized momentum, and SGD for all other parameters.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024; kellerjordan.github.io/posts/muon), with
the options of github.com/KellerJordan/cifar10-airbench. torch.optim.Muon accepts only matrices, neither filters nor
vectors.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecurve.checkpoint.optimizer_state import shard_like
from onecurve.network.compilation import compiled, should_compile
from onecurve.network.tensors import to_full_tensor, to_local
from onecurve.patches.torch import foreach_add, foreach_add_, foreach_mul_, foreach_norm, foreach_reciprocal

# Newton-Schulz coefficients of Jordan et al. (2024), chosen to raise small singular values quickly.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315


def muon(
    params: Iterable[Any],
    lr: float,
    momentum: float = 0.95,
    head_scale: float = 5.0,
    vector_scale: float = 5.0,
    vector_momentum: float = 0.9,
    weight_decay: float = 0.0,
    unit_filters: bool = False,
    whitening_fraction: float = 1.0,
    iterations: int = 5,
    compile: bool | str = False,
) -> Optimizer:
    """Build the optimizer over named parameters, grouped by their role.

    Args:
        params: (name, parameter) pairs, as those of `named_parameters()`, or groups of them.
        lr: learning rate of the filters and matrices of hidden layers: about the size of a step in every direction.
        momentum: Nesterov momentum of the filters and matrices of hidden layers.
        head_scale: SGD learning rate of the weights of the block `head`, the last one, in units of `lr`.
        vector_scale: SGD learning rate of biases and other vectors, in units of `lr`.
        vector_momentum: Nesterov momentum of SGD.
        weight_decay: fraction of a weight that one step removes at the peak of the schedule.
        unit_filters: scale hidden filters to a mean norm of one before each step, instead of their weight decay.
        whitening_fraction: fraction of the run in which the learning rate of a whitening layer's bias falls to zero.
        iterations: number of Newton-Schulz iterations.
        compile: whether a GPU runs the step compiled; a mode of torch.compile counts as true.
    """
    rates = {"filters": lr, "head": lr * head_scale, "vectors": lr * vector_scale, "whitening": lr * vector_scale}
    groups: dict[str, dict[str, Any]] = {
        role: {
            "name": role,
            "params": [],
            "lr": rate,
            "weight_decay": weight_decay / rate if rate and not (unit_filters and role == "filters") else 0.0,
            "schedule_fraction": whitening_fraction if role == "whitening" else 1.0,
            "orthogonal": role == "filters",
            "momentum": momentum if role == "filters" else vector_momentum,
            "unit_filters": unit_filters,
            "iterations": iterations,
        }
        for role, rate in rates.items()
    }
    for one in params:
        for name, parameter in one["params"] if isinstance(one, dict) else [one]:
            groups[_role(name, parameter)]["params"].append((name, parameter))
    return Muon([group for group in groups.values() if group["params"]], compile)


def _role(name: str, parameter: Tensor) -> str:
    blocks = name.split(".")
    if "whitening" in blocks:
        return "whitening"
    if "head" in blocks and parameter.ndim > 1:
        return "head"
    return "filters" if parameter.ndim in (2, 4) else "vectors"


class Muon(Optimizer):
    """Updates `orthogonal` groups by Muon, and all other groups by SGD with Nesterov momentum.

    For a sharded tensor, each rank orthogonalizes the full update and applies its shard. `compile` is that of `muon`;
    sharded tensors are not compiled, nor is the optimizer that ZeroRedundancyOptimizer builds, nor a copy.
    """

    compile: bool | str = False  # torch copies an optimizer without the attributes of its object

    def __init__(self, params: Any, compile: bool | str = False) -> None:
        super().__init__(params, {})
        self.compile = compile

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if parameters := [parameter for parameter in group["params"] if parameter.grad is not None]:
                self._step(parameters, group)
        return loss

    def _step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        directions = compiled(_directions) if should_compile(self.compile, parameters[0]) else _directions
        updates = directions(parameters, gradients, momenta, group)
        if group["orthogonal"] and not group["unit_filters"]:
            foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        foreach_add_(parameters, updates, alpha=-group["lr"])


def _directions(parameters: list[Tensor], gradients: Any, momenta: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
    """Update the momenta, and return the step of each parameter at a learning rate of one.

    Filters are scaled to a mean norm of one before their step, if the group says so. The learning rate is not used
    here: it changes with each step, and a compiled function would be compiled again.
    """
    if not group["orthogonal"]:
        gradients = foreach_add(gradients, parameters, alpha=group["weight_decay"])
    foreach_mul_(momenta, group["momentum"])
    foreach_add_(momenta, gradients)
    updates: Any = foreach_add(gradients, momenta, alpha=group["momentum"])
    if not group["orthogonal"]:
        return updates
    if group["unit_filters"]:
        norms = foreach_norm([to_full_tensor(parameter) for parameter in parameters])
        scales: Any = foreach_reciprocal(norms)
        foreach_mul_(scales, [len(parameter) ** 0.5 for parameter in parameters])
        foreach_mul_([to_local(parameter) for parameter in parameters], scales)
    full = orthogonalize([to_full_tensor(update) for update in updates], group["iterations"])
    return [shard_like(update, parameter) for update, parameter in zip(full, parameters, strict=True)]


def orthogonalize(updates: list[Tensor], iterations: int) -> list[Tensor]:
    """Return (outputs, inputs, ...) tensors with the singular values, as matrices with a row per output, near one.

    Each Newton-Schulz iteration applies an odd polynomial of degree five to the singular values. They end between about
    0.7 and 1.2. bfloat16 is precise enough for that; only float64 tensors are computed in their own type. On a GPU
    tensors of equal shape are computed together, but not with `bit_exact=true`: a library may multiply several matrices
    with another kernel than one, and ZeRO gives each rank other ones.
    """
    results: dict[int, Tensor] = {}
    numbers = range(len(updates))
    groups = [[index] for index in numbers]
    if updates and updates[0].is_cuda and not torch.are_deterministic_algorithms_enabled():
        shapes = dict.fromkeys(update.shape for update in updates)
        groups = [[index for index in numbers if updates[index].shape == shape] for shape in shapes]
    for indices in groups:
        # The order of a matrix's columns has no effect. With the channels last, channels-last filters need no copy.
        moved = [updates[index].movedim(1, -1) for index in indices]
        batch = _iterate(torch.stack([update.flatten(1) for update in moved]), iterations)
        for index, result in zip(indices, batch.unflatten(2, moved[0].shape[1:]), strict=True):
            results[index] = result.movedim(-1, 1)
    return [results[index] for index in numbers]


def _iterate(matrices: Tensor, iterations: int) -> Tensor:
    """Orthogonalize (n, rows, columns) matrices."""
    x = matrices.to(torch.float64 if matrices.dtype == torch.float64 else torch.bfloat16)
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=_CUBIC, alpha=_QUINTIC)
        x = torch.baddbmm(x, polynomial, x, beta=_LINEAR)
    return (x.mT if is_tall else x).to(matrices.dtype)
