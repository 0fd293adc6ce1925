"""A training step of the full network and of its stages, on every rank before training: they must be equal.

A tracer does not see `torch.no_grad()` or the backward pass of an `autograd.Function`, and a schedule computes the
backward pass in its own way.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

from src.engine.determinism.dropout import dropouts, set_keys
from src.engine.determinism.random_functions import sample_random
from src.engine.parallel.batch_norm import grouped_norms
from src.engine.parallel.pipeline.graph import set_mode
from src.engine.parallel.pipeline.stage import Stage
from src.engine.utils.errors import UserError


def check_stages(net: nn.Module, stages: Sequence[Stage], inputs: Tensor, schedule: str, splits_backward: bool) -> int:
    """Check that the stages train like the network, and number their calls of random functions.

    Args:
        net: the full network, whose gradients are deleted.
        stages: all its stages.
        inputs: a micro-batch of random inputs.
        schedule: name of the schedule, for the error.
        splits_backward: whether the schedule computes the gradients of the weights in a separate pass.

    Returns:
        The number of calls of random functions in the forward pass.

    Raises:
        UserError: if the stages cannot be run, or an output, gradient or buffer is another.
    """
    before = sample_random.calls
    expected = _observe(net, inputs, lambda: _train_network(net, inputs))
    calls = sample_random.calls - before
    try:
        found = _observe(net, inputs, lambda: _train_stages(stages, inputs, splits_backward))
    except Exception as error:  # a schedule may not support anything that a network contains
        cause = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(
            f"strategy.schedule={schedule} cannot train the blocks of `model` ({cause}): take "
            "strategy.schedule=interleaved_1f1b or 1f1b, or strategy=ddp"
        ) from error
    precision = torch.finfo(expected["outputs"].dtype).eps ** 0.5
    floats = {name: value for name, value in expected.items() if name not in dict(net.named_buffers())}
    smallest = precision * max(_norm(value) for value in floats.values())
    for name in expected | found:
        one, other = expected.get(name), found.get(name)
        if not _are_close(one, other, precision, smallest):
            raise UserError(
                f"the stages of `model` do not train like the network: {name} is another, as with torch.no_grad() or "
                "an autograd.Function outside of the blocks. Move it into a block, or use strategy=ddp or fsdp"
            )
    return calls


def _are_close(one: Tensor | None, other: Tensor | None, precision: float, smallest: float) -> bool:
    """Return whether two values agree to rounding; those of a value that is missing are zeros."""
    if one is None or other is None:
        return all(_norm(value) <= precision * smallest for value in (one, other) if value is not None)
    if torch.equal(one, other):  # a mask may have infinite values
        return True
    return _norm(one.double() - other.double()) <= precision * (_norm(one) + smallest)


def _norm(value: Tensor) -> float:
    return float(value.double().norm())


def _train_network(net: nn.Module, inputs: Tensor) -> Tensor:
    outputs = net(inputs.clone())
    outputs.backward(_direction(outputs))
    return outputs


def _train_stages(stages: Sequence[Stage], inputs: Tensor, splits_backward: bool) -> Tensor:
    """Run the forward and the backward passes of all stages as a schedule does; return the outputs."""
    before, passes = sample_random.calls, []
    values: tuple[Tensor, ...] = (inputs.clone(),)
    for number, stage in enumerate(stages):
        stage.calls_before = sample_random.calls - before
        values = tuple(value.detach().requires_grad_(number > 0) for value in values)
        results = stage(*values)
        passes.append((stage, results if isinstance(results, tuple) else (results,), values))
        values = passes[-1][1]
    outputs = values[0].detach().clone()
    gradients: Any = (_direction(outputs),)
    for stage, results, values in reversed(passes):
        if stage is stages[0] or not splits_backward:
            gradients = stage_backward(results, gradients, values)
        else:
            gradients, groups = stage_backward_input(list(results), list(gradients), list(values), stage.parameters())
            stage_backward_weight(stage.parameters(), groups)
    return outputs


def _direction(outputs: Tensor) -> Tensor:
    """Return gradients of the outputs, not all equal: a normalization would make a constant zero."""
    return torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype, device=outputs.device).view(outputs.shape)


def _observe(net: nn.Module, inputs: Tensor, train: Callable[[], Tensor]) -> dict[str, Tensor]:
    """Return the outputs, gradients and buffers after a training step, of which the network keeps nothing."""
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with _sample_random(net, len(inputs)):
        found = {"outputs": train().detach()}
    for name, weight in net.named_parameters():
        if weight.grad is not None:
            found[f"the gradient of {name}"] = weight.grad
    for name, buffer in net.named_buffers():
        found[name] = buffer.clone()
        if name in buffers:
            buffer.copy_(buffers[name])
    net.zero_grad()
    for norm in grouped_norms(net):
        norm.check_passes(1)
        norm.is_first_pass, norm.passes = True, 0
    return found


@contextmanager
def _sample_random(net: nn.Module, samples: int) -> Iterator[None]:
    """Train, with the same random numbers each time."""
    keys = torch.arange(samples, device=next(net.parameters()).device)
    if layers := dropouts(net):
        set_keys(layers, keys)
    with torch.random.fork_rng(devices=[]), set_mode(net, training=True):
        torch.manual_seed(0)
        sample_random.begin(lambda: keys, keys.device, is_divided=True)
        yield
        sample_random.check()
    sample_random.end()
