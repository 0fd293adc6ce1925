"""Recomputation of activations changes memory, and not what ranks send; tests/engine/parity has the curves."""

import pickle
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from onecurve.network import recomputation
from onecurve.network.recomputation import recompute_blocks
from onecurve.observe.throughput import flops_per_sample
from onecurve.run.experiment import assemble
from src.models.vit import vit
from tests.support.experiments import SHORT_RUN, VIT
from tests.support.pool import Pool
from tests.support.runs import compose, fit

ONE_GROUP = ["model=wide_resnet", "model.width=1", "model.depth=10", "model.dropout=0.2", "virtual_ranks=1"]


COLLECTIVES = ("all_gather", "all_reduce", "all_gather_single", "reduce_scatter_single")


def _count_floats(spy: mock.Mock) -> int:
    """Return the number of calls with floats. The ranks exchange integers once a second, to agree on a stop."""
    arguments = [tree_leaves((call.args, call.kwargs)) for call in spy.call_args_list]
    return sum(any(isinstance(x, Tensor) and x.is_floating_point() for x in values) for values in arguments)


def _count_collectives(cfg: DictConfig) -> tuple[dict[str, int], list[float]]:
    """Fit as configured; return the number of calls of each collective, and the losses."""
    with ExitStack() as stack:
        spies = {
            name: stack.enter_context(mock.patch.object(dist, name, wraps=getattr(dist, name))) for name in COLLECTIVES
        }
        record = fit(cfg)
        return {name: _count_floats(spy) for name, spy in spies.items()}, record.losses


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.slow)])
def test_sends_nothing_more(strategy: str, pool: Pool, small: list[str], folder: Path) -> None:
    world = [f"strategy={strategy}", "trainer.devices=2"]
    task = [*small, *SHORT_RUN, "trainer.max_steps=2", *ONE_GROUP, *world]
    kept, recomputed = (
        pool.run(2, _count_collectives, compose(folder / name, *task, f"module.recompute={name}"))
        for name in ("none", "blocks")
    )
    assert kept == recomputed
    assert sum(kept[0][0].values()) > 10


def test_vit_saves_a_quarter_of_the_bytes(small: list[str], folder: Path) -> None:
    saved = []
    for name in ("none", "blocks"):
        _, module, _ = assemble(compose(folder, *small, "model=vit", f"module.recompute={name}"))
        saved.append(saved_bytes(module, torch.rand(4, 3, 32, 32)))
    assert 0 < saved[1] < saved[0] / 4


def saved_bytes(net: nn.Module, images: Tensor) -> int:
    """Return the bytes that the graph of a forward pass keeps for the backward pass, except parameters."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    kept: dict[int, Any] = {}  # a storage that is freed could give its address to another one

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        net(images)
    return sum(storage.nbytes() for storage in kept.values())


class Noisy(nn.Module):
    """A block with torch's dropout and with buffers that each pass changes; its output depends on some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.norm = nn.BatchNorm1d(6, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(torch.dropout(self.linear(x), 0.5, self.training)))


def _gradients(net: nn.Module, precision: torch.dtype | None) -> list[Tensor]:
    """Return gradients and buffers after two micro-batches whose backward passes come after both forward passes."""
    torch.manual_seed(1)
    with torch.autocast("cpu", precision, enabled=precision is not None):
        losses = [net(torch.randn(8, 6)).float().square().sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
    return [*(parameter.grad for parameter in net.parameters()), *net.buffers()]  # type: ignore[list-item]


@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=str)
def test_generators_buffers_and_autocast_are_those_of_the_first_pass(precision: torch.dtype | None) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Noisy(), Noisy(), nn.Linear(6, 2))
    expected = _gradients(deepcopy(net), precision)
    recompute_blocks(net)
    found = _gradients(net, precision)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("copy", [deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copied", "pickled"])
def test_a_copy_uses_its_own_parameters(copy: Any) -> None:
    net = vit(10, (3, 32, 32), patch=8, width=8, depth=2, heads=2)
    recompute_blocks(net)
    recompute_blocks(net)  # without effect
    copied = copy(net)
    with mock.patch.object(recomputation, "checkpoint", wraps=recomputation.checkpoint) as checkpoint:
        copied(torch.rand(2, 3, 32, 32)).sum().backward()
    assert checkpoint.call_count == 4, "embed, two layers and head"
    assert all(parameter.grad is not None for parameter in copied.parameters())
    assert all(parameter.grad is None for parameter in net.parameters())


def test_passes_without_a_later_backward_pass_are_as_before() -> None:
    net = nn.Sequential(Noisy(), Noisy())
    names = list(net.state_dict())
    recompute_blocks(net)
    assert list(net.state_dict()) == names
    with mock.patch.object(recomputation, "checkpoint", side_effect=AssertionError):
        net.eval()(torch.rand(4, 6)).sum().backward()
        with torch.no_grad():
            net.train()(torch.rand(4, 6))


def test_counts_no_flops_of_the_recomputation(small: list[str], folder: Path) -> None:
    flops = []
    for name in ("none", "blocks"):
        cfg = compose(folder, *small, *VIT, f"module.recompute={name}")
        flops.append(flops_per_sample(assemble(cfg)[1].net, (3, 32, 32)))
    assert flops[0] == flops[1]
    assert flops[0]
