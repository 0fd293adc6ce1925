"""What a pipeline asks of a LightningModule: a step that calls `net` once, and a loss of its outputs and the batch."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from src.engine.utils.errors import UserError


def check_module(module: L.LightningModule) -> None:
    """Check that the module trains the parameters of `net` only, with the strategy's backward pass.

    Raises:
        UserError: otherwise.
    """
    for hook in ("backward", "configure_gradient_clipping"):
        if is_overridden(hook, module):
            raise UserError(
                f"strategy=pipeline computes gradients without {type(module).__name__}.{hook}, and each rank holds "
                "those of its stages: use trainer.gradient_clip_val, or strategy=ddp or fsdp"
            )
    net: Any = module.net
    inside = {id(weight) for weight in net.parameters()}
    for name, weight in module.named_parameters():
        if weight.requires_grad and id(weight) not in inside:
            raise UserError(
                f"strategy=pipeline trains the parameters of `net`, and {name} is not one of them: move it into "
                "the network, or use strategy=ddp"
            )


class _Input(BaseException):
    """Carries what a module gives its network; no `except Exception` of a user stops it."""


def _raise_input(*args: Any, **kwargs: Any) -> Tensor:
    raise _Input(*args, *kwargs.values())


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Take the place of `log` where there is no trainer's loop."""


def input_of_network(module: Any, batch: Any) -> Tensor:
    """Return what `training_step` gives the network for a batch, (n, ...).

    Raises:
        UserError: if it does not call the network with one tensor.
    """
    net, found = module.net, ()
    net.forward, own_forward = _raise_input, net.forward
    module.log = module.log_dict = _log_nothing
    try:
        module.training_step(batch, 0)
    except _Input as called:
        found = called.args
    finally:
        net.forward = own_forward
        del module.log, module.log_dict
    if len(found) != 1 or not isinstance(found[0], Tensor):
        raise UserError(
            f"strategy=pipeline: {type(module).__name__}.training_step must call its `net` with one tensor; use "
            "strategy=ddp or fsdp for other networks"
        )
    return found[0]


def check_loss(module: Any, outputs: Tensor, batch: Any) -> None:
    """Check that the loss of some outputs of the network for a micro-batch does not read its weights.

    Raises:
        UserError: otherwise, because other ranks hold most of them.
    """
    module.log = module.log_dict = _log_nothing
    try:
        loss = module.loss(outputs.requires_grad_(), batch)
    finally:
        del module.log, module.log_dict
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    read = [name for name, gradient in zip(weights, gradients, strict=True) if gradient is not None]
    if read:
        raise UserError(
            f"strategy=pipeline: {type(module).__name__}.loss reads {read[0]}, but most weights are on other ranks: "
            "compute it from the outputs and the batch alone, or use strategy=ddp"
        )
