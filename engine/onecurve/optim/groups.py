"""Build the optimizer: no weight decay for vectors, and a learning rate scaled with the batch size."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from onecurve.errors import UserError, check_choice

_RULES: dict[str, Callable[[float], float]] = {"linear": float, "sqrt": math.sqrt, "none": lambda ratio: 1.0}
_FUSED_DEVICES = ("cuda",)


def scaling_factor(rule: str, batch_size: int, reference: int) -> float:
    """Return the factor on the learning rate when a batch has `batch_size` instead of `reference` samples.

    `linear` is the rule of Goyal et al., "Accurate, large minibatch SGD" (2017). `sqrt`, from Krizhevsky, "One weird
    trick" (2014), suits adaptive optimizers.
    """
    check_choice("module.lr_scaling", rule, _RULES)
    if reference < 1:
        raise UserError(f"module.reference_batch_size={reference}: give a number of samples, at least one")
    return _RULES[rule](batch_size / reference)


def build_optimizer(
    net: nn.Module, factory: partial[Any], lr_factor: float, prefix: str, allow_fused: bool = True
) -> Optimizer:
    """Build the optimizer over two groups: matrices and filters, and vectors (biases, norms) without weight decay.

    A parameter's name is `prefix` and its name in the network. The optimizer's state dict contains the names as
    `param_names`, so that a checkpoint assigns moments to weights by name. On CUDA the fused implementation is the
    default where torch has one, unless `allow_fused` is false: it launches one kernel for many tensors.
    """
    lr = factory.keywords.get("lr")
    if not isinstance(lr, int | float) or not 0 <= lr < math.inf:
        raise UserError(f"optimizer.lr={lr} is not a learning rate: give a number of at least zero")
    named = [(f"{prefix}{name}", parameter) for name, parameter in net.named_parameters() if parameter.requires_grad]
    matrices = [(name, weight) for name, weight in named if weight.ndim > 1]
    vectors = [(name, weight) for name, weight in named if weight.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"name": "decay", "params": matrices},
        {"name": "no decay", "params": vectors, "weight_decay": 0.0},
    ]
    fused = {"fused": True} if allow_fused and _can_fuse(factory, [parameter for _, parameter in named]) else {}
    try:
        return factory([group for group in groups if group["params"]], lr=lr * lr_factor, **fused)
    except (TypeError, ValueError) as error:
        raise UserError(f"`optimizer` cannot be built: {error}") from error


def _can_fuse(factory: partial[Any], parameters: list[nn.Parameter]) -> bool:
    """Return whether the fused implementation exists for these parameters, and the user has chosen no other."""
    kind: Any = factory.func  # a class, or a function such as `muon`
    # Adagrad's exists for CPUs only in torch before 2.13.
    has_fused = isinstance(kind, type) and issubclass(kind, SGD | Adam | AdamW)
    if not has_fused or {"fused", "foreach", "differentiable"} & factory.keywords.keys():
        return False
    if any(parameter.device.type not in _FUSED_DEVICES for parameter in parameters):
        return False
    # torch 2.13 has sharding rules for _fused_adam_ and _fused_adamw_ only (distributed/tensor/_ops/_pointwise_ops.py).
    is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    return not is_sharded or not issubclass(kind, SGD)
