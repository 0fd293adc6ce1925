"""Check that a network is the chain of blocks that some strategies take apart."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from src.utils.errors import UserError


def check_is_chain(net: nn.Module, blocks: Iterable[tuple[str, nn.Module]], images: Tensor) -> None:
    """Check that the forward pass calls the blocks one after another, and does nothing else.

    It runs once: each block must get the very tensor that the block before it returned.

    Args:
        net: network.
        blocks: names and modules of its blocks, in order.
        images: (n, channels, height, width) images of any values.

    Raises:
        UserError: if the forward pass does anything else; the chain of its blocks would be another network.
    """
    calls: list[tuple[nn.Module, tuple[Any, ...], Any]] = []
    blocks = list(blocks)
    hooks = [block.register_forward_hook(lambda *call: calls.append(call)) for _, block in blocks]
    was_training = net.training
    net.eval()  # the running statistics of batch normalization must not change
    with torch.no_grad():
        output = net(images)
    net.train(was_training)
    for hook in hooks:
        hook.remove()
    x: Any = images
    for (name, block), (called, inputs, result) in zip(blocks, calls, strict=False):
        if called is not block or len(inputs) != 1 or inputs[0] is not x:
            raise _error(f"before `{name}`")
        x = result
    if len(calls) != len(blocks) or output is not x:
        raise _error("after its last block")


def _error(place: str) -> UserError:
    return UserError(
        "this strategy runs the blocks of `model` one after another, but the forward pass does something else "
        f"{place}: make the network an nn.Sequential of its blocks, or use strategy=ddp or fsdp"
    )
