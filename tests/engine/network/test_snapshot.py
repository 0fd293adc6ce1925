"""A pass leaves no trace in modules: their weights, buffers and attributes are as before."""

import copy
import random
import threading
from collections import Counter, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from onecurve.network import snapshot
from onecurve.network.snapshot import unchanged
from tests.support.habits import Meter


def test_modules_are_as_before() -> None:
    net: Any = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False))
    net.numbers, net.table, net.last = [1], {"a": 1}, torch.ones(2)
    net.register_buffer("steps", torch.zeros(()))
    net.register_buffer("same", net.steps)
    net.register_buffer("later", None)
    net.register_buffer("gone", torch.ones(()))
    steps = net.steps
    held, before = net.numbers, {name: value.clone() for name, value in net.state_dict().items()}
    with unchanged(net.modules()):
        net(torch.randn(3, 2))
        net[1].weight.data.add_(1)
        net.numbers.append(2)
        net.table["b"] = 2
        net.last.zero_()
        net.new = 1
        net.steps, net.later = net.steps + 1, net.steps + 2
        net.register_buffer("made", torch.ones(()))
        del net.gone
    assert net.steps is net.same is steps
    assert net.later is None
    assert not hasattr(net, "made")
    assert (net.numbers, net.table, net.last.tolist()) == ([1], {"a": 1}, [1, 1])
    assert net.numbers is held
    assert not hasattr(net, "new")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


class Kept(nn.Module):
    """Holds state of every kind that a step may change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.meter, self.namespace = Meter(), SimpleNamespace(seen=0)
        self.table: dict[str, Any] = {"train": [1], "val": {"deep": [{"x": 1}]}, "tensors": [torch.ones(2)]}
        self.lists = defaultdict[str, list[int]](list, a=[1])
        self.counts, self.queue = Counter("ab"), deque([1, 2], maxlen=2)
        self.array, self.several = np.ones(2), (Meter(), {1})
        self.generators: list[Any] = [
            torch.Generator(),
            np.random.default_rng(0),
            np.random.RandomState(0),
            random.Random(0),
        ]
        self.hidden = [nn.Linear(2, 2)]  # no submodule
        self.data, self.owner = TensorDataset(torch.ones(2)), L.Trainer(logger=False, barebones=True)
        self.files = [threading.Lock(), iter([1]), self]

    def change(self) -> None:
        with torch.no_grad():
            self.weight.mul_(0.99)
            self.other.data = torch.zeros(3)
            self.hidden[0].weight.zero_()
        self.table["train"].append(2)
        self.table["val"]["deep"][0]["x"] = 2
        self.table["tensors"][0].zero_()
        self.table["new"] = 1
        self.lists["a"].append(2)
        self.lists["b"].append(1)
        self.counts.update("bc")
        self.queue.append(3)
        self.meter.update(1.0)
        self.several[0].update(1.0)
        self.several[1].add(2)
        self.namespace.seen += 1
        self.array += 1
        self.numbers()

    def numbers(self) -> list[Any]:
        torch_generator, *numpy_generators, python = self.generators
        draws = [float(generator.uniform()) for generator in numpy_generators]
        return [float(torch.rand((), generator=torch_generator)), *draws, python.random()]

    def state(self) -> Any:
        weights = [self.weight.tolist(), self.other.tolist(), self.hidden[0].weight.tolist(), self.array.tolist()]
        meters = [(meter.sum, meter.count, meter.history) for meter in (self.meter, self.several[0])]
        kept = [self.table, dict(self.lists), self.counts, self.queue, self.several[1], self.namespace.seen]
        return copy.deepcopy(str([weights, meters, kept]))


def test_all_that_a_pass_changes_is_as_before() -> None:
    kept = Kept()
    held = [kept.table["train"], kept.meter, kept.queue, kept.lists["a"], kept.weight, kept.other, kept.data]
    before, memory = kept.state(), kept.other.data_ptr()
    with unchanged(kept.modules()) as restore:
        draws = kept.numbers()
        for _ in range(2):
            restore()
            assert kept.state() == before
            assert kept.numbers() == draws
            kept.change()
    assert kept.state() == before
    assert kept.numbers() == draws
    assert kept.other.data_ptr() == memory
    now = [kept.table["train"], kept.meter, kept.queue, kept.lists["a"], kept.weight, kept.other, kept.data]
    assert all(one is other for one, other in zip(now, held, strict=True))


def test_a_scripted_module_is_as_before() -> None:
    net: Any = nn.Sequential(torch.jit.script(nn.BatchNorm1d(2)))
    before = copy.deepcopy(net.state_dict())
    with unchanged(net.modules()):
        net(torch.randn(3, 2))
        net[0].weight.data.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_data_in_containers_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MOST_BYTES", 100)
    net: Any = nn.Module()
    net.register_buffer("bank", torch.zeros(1000))
    net.adjacency, net.data = torch.eye(2).to_sparse(), [np.zeros(10), np.zeros(10)]
    with unchanged([net]):
        net.bank += 1
        for array in net.data:
            array += 1
    assert [net.bank[0].item(), net.data[0][0], net.data[1][0]] == [0, 0, 1]
