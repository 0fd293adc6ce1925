"""A pipeline splits networks with a forward pass of their own, or refuses them; it never trains another network."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecurve.errors import UserError
from onecurve.parallel.pipeline.blocks import Block, ordered_blocks
from onecurve.parallel.pipeline.rehearsal import check_stages
from onecurve.parallel.pipeline.split import cut, format_table
from onecurve.parallel.pipeline.stage import Stage, stage_inputs
from tests.support import zoo

IMAGES = torch.rand(2, 3, 8, 8)


class TwoBlocks(nn.Module):
    """A network of two blocks and any forward pass."""

    def __init__(self, forward: Callable[["TwoBlocks", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.pass_forward = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), forward
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.pass_forward(self, x)


class Wrapper(nn.Module):
    """A network in a network, which calls one of its modules twice."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = TwoBlocks(lambda net, x: net.relu(net.second(net.relu(net.first(x)))))

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x)


@pytest.mark.parametrize(
    ("net", "names"),
    [
        (zoo.LoopedList(), "stem convs.0 norms.0 convs.1 norms.1 convs.2 norms.2 head"),
        (Wrapper(), "backbone.first backbone.relu backbone.second backbone.relu"),
        (zoo.Skips(), "stem first second third head"),
    ],
    ids=["own forward", "wrapper", "skips"],
)
def test_finds_the_blocks(net: nn.Module, names: str) -> None:
    """tests/engine/parity/test_networks.py trains such networks on stages of them."""
    blocks = ordered_blocks(net, torch.rand(2, 3, 32, 32))
    assert [block.name for block in blocks] == names.split()
    assert {name for block in blocks for name in block.parameters} == {name for name, _ in net.named_parameters()}
    positions = 32 * 32 // (16 if isinstance(net, zoo.LoopedList) else 1)
    assert blocks[0].flops == 2 * 2 * net.get_parameter(f"{blocks[0].name}.weight").numel() * positions
    assert net.training


def frozen(net: TwoBlocks, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = net.first(x)
    return net.second(x)


def layer_drop(net: TwoBlocks, x: Tensor) -> Tensor:
    return net.second(x if net.training and torch.rand(()) < 1e-6 else net.first(x))


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda net, x: net.second(net.first(x)) if x.sum() > 0 else x, "cannot be traced"),
        (lambda net, x: F.dropout(net.second(net.first(x)), 0.1, net.training), "another in training"),
        (layer_drop, "draws random numbers"),
        (lambda net, x: net.second(net.first(x)) * torch.tensor(0.5 if net.training else 1.0), "creates tensors"),
    ],
    ids=["depends on values", "dropout function", "layer drop", "constant"],
)
def test_refuses_what_it_cannot_split(forward: Callable[[TwoBlocks, Tensor], Tensor], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ordered_blocks(TwoBlocks(forward), IMAGES)


def as_stages(net: nn.Module, parts: list[list[Block]]) -> list[Stage]:
    return [Stage(net, blocks, stage_inputs(parts, number)) for number, blocks in enumerate(parts)]


def squares(outputs: Tensor) -> Tensor:
    return outputs.square().sum()


class Reversal(torch.autograd.Function):
    """Reverses gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


@pytest.mark.parametrize(
    ("forward", "penalty"),
    [
        (frozen, 0.0),
        (lambda net, x: net.second(Reversal.apply(net.first(x))), 0.0),
        (lambda net, x: net.second(net.first(x)), 0.1),
    ],
    ids=["frozen block", "gradient reversal", "loss that reads weights"],
)
def test_refuses_stages_that_train_another_network(
    forward: Callable[[TwoBlocks, Tensor], Tensor], penalty: float
) -> None:
    net = TwoBlocks(forward)
    first, second = ordered_blocks(net, IMAGES)
    stages = as_stages(net, [[first], [second]])
    with pytest.raises(UserError, match=r"the gradient of first\.weight is another"):
        check_stages(net, stages, IMAGES, lambda x: squares(x) + penalty * squares(net.first.weight), "1f1b")


def test_masks_do_not_hide_that_stages_train_another_network() -> None:
    """A causal mask has infinite values, a padding mask bools."""
    net = TwoBlocks(lambda net, x: net.second(net.first(x).detach()) if net.is_detached else net.second(net.first(x)))
    net.is_detached = False  # type: ignore[assignment]
    net.register_buffer("causal", torch.full((3, 3), -torch.inf).triu(1))
    net.register_buffer("padding", torch.ones(3, dtype=torch.bool))
    first, second = ordered_blocks(net, IMAGES)
    stages = as_stages(net, [[first], [second]])
    check_stages(net, stages, IMAGES, squares, "1f1b")
    net.is_detached = True  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"the gradient of first.weight is another"):
        check_stages(net, stages, IMAGES, squares, "1f1b")


def test_reads_buffers_when_it_runs() -> None:
    """A checkpoint may hold another value of the buffer."""
    net: Any = TwoBlocks(lambda net, x: net.second(net.first(x)) * torch.sigmoid(cast(Any, net).scale))
    net.register_buffer("scale", torch.zeros(1))
    blocks = ordered_blocks(net, IMAGES)
    stages = as_stages(net, [blocks[:1], blocks[1:]])
    net.scale.fill_(2.0)
    assert torch.equal(stages[1](*stages[0](IMAGES))[0], net(IMAGES))


def test_refuses_a_parameter_of_two_stages() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    with pytest.raises(UserError, match=r"0.weight and 1.weight are one tensor"):
        cut(ordered_blocks(net, torch.rand(2, 4)), 2, "auto")


def test_does_not_cut_where_a_size_is_passed_on() -> None:
    def forward(net: TwoBlocks, x: Tensor) -> Tensor:
        samples = x.shape[0]
        return net.second(net.first(x)).reshape(samples, -1)

    with pytest.raises(UserError, match="no cut into 2 stages"):
        cut(ordered_blocks(TwoBlocks(forward), IMAGES), 2, ["second"])


def test_the_table_names_the_blocks_after_which_a_mask_forbids_a_cut() -> None:
    def forward(net: TwoBlocks, x: Tensor) -> Tensor:
        mask = x > 0
        return net.second(net.first(x)) * mask

    blocks = ordered_blocks(TwoBlocks(forward), IMAGES)
    assert format_table([blocks], [0])[-1].startswith("  no cut after first: not all that passes there")
    assert "no cut" not in format_table([ordered_blocks(nn.Sequential(nn.Linear(4, 4)), torch.rand(2, 4))], [0])[-1]
