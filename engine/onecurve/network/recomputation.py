"""Recomputation of activations in the backward pass, one block of the network at a time (activation checkpointing).

Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory cost" (2016). torch.utils.checkpoint restores
torch's random generators and autocast. This module adds the state that it does not know: buffers begin with their
values before the first pass and keep those after it (https://github.com/pytorch/pytorch/issues/96136), and a layer
takes other values of the first pass by `remember`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Optional, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onecurve.errors import UserError
from onecurve.patches.torch import AnyBatchNorm

_T = TypeVar("_T")


def block_names(net: nn.Module, prefix: str = "", is_sequence: bool = False) -> Iterator[str]:
    """Yield the name of each block of a network: its children, or what takes the place of a child.

    An `nn.Sequential` of composite modules and a list of modules stand for their parts, and a network in a network for
    its own children.
    """
    trainable = [child for child in net.children() if next(child.parameters(), None) is not None]
    for name, child in net.named_children():
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_list or (isinstance(child, nn.Sequential) and all(_is_composite(part) for part in child)):
            yield from block_names(child, f"{prefix}{name}.", is_sequence=True)
        elif trainable == [child] and _is_composite(child) and not is_sequence:
            yield from block_names(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _is_composite(module: nn.Module) -> bool:
    # A normalization layer with its activation inside, as in timm, is still one layer.
    return next(module.children(), None) is not None and not isinstance(module, AnyBatchNorm)


def recompute_blocks(net: nn.Module) -> None:
    """Let the blocks of several layers, with parameters, recompute their activations. A single layer saves its input.

    Raises:
        UserError: if the network has no such block.
    """
    parts = [net.get_submodule(name) for name in block_names(net)]
    blocks = [part for part in parts if _is_composite(part) and next(part.parameters(), None) is not None]
    if not blocks:
        raise UserError("module.recompute=blocks: `model` has no block of several layers: set module.recompute=none")
    for block in blocks:
        if getattr(block.forward, "func", None) is not _forward:  # a network may be passed on a second time
            # A partial of a module-level function, unlike a closure, survives pickling and copying of the network.
            block.forward = partial(_forward, block, block.forward)


def _forward(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Parameters are meta tensors while FLOPs are counted. They take no memory, and are swapped back before the backward
    # pass.
    if not block.training or not torch.is_grad_enabled() or next(block.parameters()).is_meta:
        return forward(*args, **kwargs)
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=partial(_passes, block))


def _passes(block: nn.Module) -> tuple["_Pass", "_Pass"]:
    first = _Pass(block)
    return first, _Pass(block, first)


def remember(compute: Callable[[], _T]) -> _T:
    """Return the value of `compute`, or in the recomputation of a block the value that it had in the first pass."""
    return compute() if _current is None else _current.remember(compute)


class _Pass:
    """Context of the first pass of a block, or of a recomputation, which repeats the pass `first`.

    Attributes:
        values: what `remember` returned in the first pass, in order.
        buffers: copies of the block's buffers before the pass.
    """

    def __init__(self, block: nn.Module, first: Optional["_Pass"] = None) -> None:
        self.block, self.first = block, first
        self.values: list[Any] = []
        self.buffers: list[Tensor] = []

    def __enter__(self) -> None:
        global _current
        _current = self
        self.buffers = [buffer.clone() for buffer in self.block.buffers()]
        if self.first is not None:
            self.values = list(self.first.values)
            _restore_buffers(self.block, self.first.buffers)

    def __exit__(self, *_: object) -> None:
        global _current
        _current = None
        if self.first is not None:
            _restore_buffers(self.block, self.buffers)

    def remember(self, compute: Callable[[], Any]) -> Any:
        if self.first is not None:
            return self.values.pop(0)
        self.values.append(compute())
        return self.values[-1]


_current: _Pass | None = None  # a backward pass may run in another thread, but never at the same time


def _restore_buffers(block: nn.Module, values: list[Tensor]) -> None:
    for buffer, value in zip(block.buffers(), values, strict=True):
        buffer.copy_(value)
