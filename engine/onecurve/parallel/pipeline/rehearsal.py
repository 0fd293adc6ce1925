"""A training step of the full network and of its stages, on every rank before training: they must be equal.

A tracer does not see `torch.no_grad()` or the backward pass of an `autograd.Function`, a schedule computes the backward
pass in its own way, and a loss may read weights, most of which are on other ranks.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from onecurve.errors import UserError
from onecurve.network.module_state import call_step, set_mode, with_own_hook, without_log
from onecurve.network.net import NET, network_of
from onecurve.network.snapshot import unchanged
from onecurve.parallel.batch_norm import grouped_norms
from onecurve.parallel.pipeline.schedules import SCHEDULES
from onecurve.parallel.pipeline.stage import Stage
from onecurve.patches.pipelining import stage_backward, stage_backward_input, stage_backward_weight
from onecurve.random.dropout import dropouts, set_keys
from onecurve.random.random_functions import sample_random

_log = logging.getLogger(__name__)
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_ELEMENTWISE = ("torch.optim.", "onecurve.optim.")  # modules of optimizers that update each weight by itself


def check_module(module: L.LightningModule) -> None:
    """Check that the module trains the parameters of `net` only, with the strategy's backward pass."""
    for hook in ("backward", "configure_gradient_clipping"):
        if is_overridden(hook, module):
            raise UserError(
                f"strategy=pipeline computes gradients without {type(module).__name__}.{hook}, and each rank holds "
                "those of its stages: use trainer.gradient_clip_val, or strategy=ddp or fsdp"
            )
    for name, weight in module.named_parameters():
        if weight.requires_grad and not name.startswith(f"{NET}."):
            raise UserError(
                f"strategy=pipeline trains the parameters of `net`, and {name} is not one of them: move it into "
                "the network, or use strategy=ddp"
            )


def check_updates(trainer: Any, optimizers: Sequence[Optimizer], is_cut: bool) -> None:
    """Check that optimizers and callbacks use no number of all weights, of which a rank has those of its stages.

    `is_cut` says that the module has configured the optimizers from these stages.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise UserError(
                "strategy=pipeline: LBFGS multiplies the gradients of all weights, of which a rank has those of its "
                "stages: use strategy=ddp"
            )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if is_cut and len(groups) > len(optimizers) and not all("name" in group for group in groups):
        raise UserError(
            "strategy=pipeline: this trainer has divided the network already, and the module would choose the "
            "optimizer's parameter groups from the stages of each rank: fit with a new Trainer"
        )
    _warn_of_own_stages(trainer, optimizers)


def _warn_of_own_stages(trainer: Any, optimizers: Sequence[Optimizer]) -> None:
    """Warn of what may take a norm over gradients, of which a rank has those of its stages."""
    module = trainer.lightning_module
    found = [(one, hook) for hook in _GRADIENT_HOOKS for one in with_own_hook(trainer, hook)]
    found += [(module, "optimizer_step")] if is_overridden("optimizer_step", module) else []
    found += [(one, "step") for one in optimizers if not type(one).__module__.startswith(_ELEMENTWISE)]
    for one, function in found:
        _log.warning(
            "strategy=pipeline: %s.%s sees the gradients of the stages of its own rank: if it uses a norm over them, "
            "that is not the norm of the network; clip by trainer.gradient_clip_val",
            type(one).__name__,
            function,
        )


class _Called(BaseException):
    """Ends a step where it calls its network; no `except Exception` of a user stops it."""


def input_of_network(module: Any, batch: Any, batch_idx: int = 0) -> Tensor:
    """Return what `training_step` gives the network for a batch, (n, ...)."""
    forward_raises = mock.patch.object(network_of(module), "forward", side_effect=_Called)
    outside = set(module.modules()).difference(network_of(module).modules())
    try:
        with unchanged(outside), without_log(module), forward_raises as forward, suppress(_Called):
            call_step(module, "training_step", batch, batch_idx)
    except AttributeError as error:
        raise UserError(
            f"strategy=pipeline calls {type(module).__name__}.training_step before the hooks of training, to see what "
            f"`net` gets, and there {error}: give the attribute a first value in __init__, or use strategy=ddp or fsdp"
        ) from error
    found = [value for call in forward.call_args_list for value in (*call.args, *call.kwargs.values())]
    if len(found) != 1 or not isinstance(found[0], Tensor):
        raise UserError(
            f"strategy=pipeline: {type(module).__name__}.training_step must call its `net` with one tensor; use "
            "strategy=ddp or fsdp for other networks"
        )
    return found[0]


def check_stages(
    net: nn.Module, stages: Sequence[Stage], inputs: Tensor, loss: Callable[[Tensor], Tensor], schedule: str
) -> None:
    """Check that all stages of the network train as it does for a micro-batch of inputs; its gradients are deleted.

    It compares outputs, gradients and buffers, and whether `schedule`, a key of `SCHEDULES`, can run the stages.
    """
    splits_backward = SCHEDULES[schedule].splits_backward
    expected = _observe(net, len(inputs), lambda: _train_network(net, inputs.clone(), loss))
    try:
        found = _observe(net, len(inputs), lambda: _train_stages(stages, inputs.clone(), loss, splits_backward))
    except Exception as error:  # a schedule may not support anything that a network contains
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(
            f"strategy.schedule={schedule} cannot train the blocks of `model` ({cause}): take "
            "strategy.schedule=interleaved_1f1b or 1f1b, or strategy=ddp"
        ) from error
    buffers = dict(net.named_buffers())  # a mask may have infinite values
    largest = max(_norm(value) for name, value in expected.items() if name not in buffers)
    for name, value in expected.items():
        if not _is_near(found[name], value, largest, torch.finfo(expected["outputs"].dtype).eps ** 0.5):
            raise UserError(
                f"the stages of `model` do not train like the network: {name} is another, as with torch.no_grad() or "
                "an autograd.Function outside of the blocks, or a loss that reads weights. Move it into a block, or "
                "use strategy=ddp or fsdp"
            )


def _is_near(found: Tensor, expected: Tensor, largest: float, precision: float) -> bool:
    """Return whether two tensors differ by rounding only; near zero, relative to the `largest` norm of all tensors."""
    tolerance = precision * (_norm(expected) + precision * largest)
    return torch.equal(found, expected) or _norm(found.double() - expected.double()) <= tolerance


def _norm(value: Tensor) -> float:
    return float(value.double().norm())


def _train_network(net: nn.Module, inputs: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    outputs = net(inputs)
    loss(outputs).backward()
    return outputs


def _train_stages(
    stages: Sequence[Stage], inputs: Tensor, loss: Callable[[Tensor], Tensor], splits_backward: bool
) -> Tensor:
    """Run the forward and the backward passes of all stages as a schedule does; return the outputs."""
    values: tuple[Tensor, ...] = (inputs,)
    passes = []
    for number, stage in enumerate(stages):
        received = tuple(value.detach().requires_grad_(number > 0) for value in values)
        values = stage(*received)
        passes.append((stage, values, received))
    outputs = values[0].detach().requires_grad_()
    gradients: Any = torch.autograd.grad(loss(outputs), outputs)
    for stage, values, received in reversed(passes):
        if stage is stages[0] or not splits_backward:
            gradients = stage_backward(values, gradients, received)
        else:
            gradients, groups = stage_backward_input(list(values), list(gradients), list(received), stage.parameters())
            stage_backward_weight(stage.parameters(), groups)
    return outputs.detach()


def _observe(net: nn.Module, samples: int, train: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Return the outputs, gradients and buffers after a training step, of which the network keeps nothing.

    The random numbers are the same each time.
    """
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    keys = torch.arange(samples, device=next(net.parameters()).device)
    if layers := dropouts(net):
        set_keys(layers, keys)
    with torch.random.fork_rng(devices=[]), set_mode(net, training=True):
        torch.manual_seed(0)
        sample_random.begin(lambda: keys, keys.device, is_divided=True)
        found = {"outputs": train().detach()}
        sample_random.check()
    sample_random.end()
    for name, buffer in net.named_buffers():
        found[name] = buffer.clone()
        if name in buffers:
            buffer.copy_(buffers[name])
    for norm in grouped_norms(net):
        norm.check_passes(1)
        norm.begin_step()
    for name, weight in net.named_parameters():
        found[f"the gradient of {name}"] = torch.zeros_like(weight) if weight.grad is None else weight.grad
    net.zero_grad()
    return found
