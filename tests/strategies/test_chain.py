"""Strategies that take a network apart refuse one that is not the chain of its blocks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from src.strategies.chain import check_is_chain
from src.strategies.pipeline.split import ordered_blocks
from src.utils.errors import UserError

IMAGES = torch.zeros(2, 3, 8, 8)  # zeros, which would hide a missing ReLU from a comparison of outputs


class TwoBlocks(nn.Module):
    """A network of two blocks and a forward pass of its own."""

    def __init__(self, forward: Callable[["TwoBlocks", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.pass_forward = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), forward

    def forward(self, x: Tensor) -> Tensor:
        return self.pass_forward(self, x)


def test_accepts_a_chain() -> None:
    net = TwoBlocks(lambda net, x: net.second(net.first(x)))
    check_is_chain(net, net.named_children(), IMAGES)
    assert [block.name for block in ordered_blocks(net, IMAGES)] == ["first", "second"]
    assert net.training


@pytest.mark.parametrize(
    ("forward", "place"),
    [
        (lambda net, x: net.second(net.first(x).relu()), "before `second`"),
        (lambda net, x: net.second(net.first(x)).relu(), "after its last block"),
        (lambda net, x: net.first(net.second(x)), "before `first`"),
        (lambda net, x: net.first(net.second(net.first(x))), "after its last block"),
        (lambda net, x: x + net.second(net.first(x)), "after its last block"),
        (lambda net, x: net.second(net.first(2 * x)), "before `first`"),
        (lambda net, x: net.first(x), "after its last block"),
    ],
    ids=["between", "at the end", "in another order", "twice", "skip connection", "at the start", "unused block"],
)
def test_refuses_any_other_forward_pass(forward: Callable[[TwoBlocks, Tensor], Tensor], place: str) -> None:
    with pytest.raises(UserError, match=place):
        ordered_blocks(TwoBlocks(forward), IMAGES)
