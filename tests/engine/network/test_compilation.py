"""Compiled augmentation, loss and optimizer compute what the eager functions do, and are compiled once."""

import pickle
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from onecurve.network.compilation import compile_blocks, compiled
from onecurve.optim import muon
from src.data.augment.augmentation import Augmentation
from src.data.augment.pixels import crop_and_flip, sample_keys
from src.models.airbench import airbench
from tests.engine.optim.test_muon import build, take_steps

IMAGES = torch.arange(32 * 3 * 32 * 32).remainder(251).to(torch.uint8).view(32, 3, 32, 32)
INDEX = torch.arange(32) * 3
Compile = Callable[[Any], Any]


@pytest.fixture
def compile() -> Iterator[Compile]:
    """Return a function that compiles by dynamo, autograd and Inductor's decompositions, without machine code."""
    torch._dynamo.reset()
    counters.clear()
    yield lambda function: torch.compile(function, dynamic=False, fullgraph=True, backend="aot_eager_decomp_partition")
    torch._dynamo.reset()


@pytest.mark.parametrize(("is_deterministic", "expected"), [(True, "reduce-overhead"), (False, "max-autotune")])
def test_bit_exact_runs_choose_no_kernel_by_its_time(
    is_deterministic: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[Any] = []

    def compile(function: Any, mode: str) -> Any:
        modes.append(mode)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    compile_blocks(torch.nn.ReLU(), "max-autotune")
    assert modes == [expected]


def augment(function: Any, options: dict[str, Any], epoch: int) -> Tensor:
    augmentation = Augmentation(**options)
    augmentation.samples = 100
    keys, mirrored = augmentation.keys(7, epoch, INDEX)
    return function(augmentation, IMAGES, keys, mirrored, [0.4, 0.5, 0.6], [0.2, 0.25, 0.3], torch.float32)


@pytest.mark.parametrize("options", [{}, {"flip": "alternating", "crop_padding": 2}, {"cutout": 8, "flip": False}])
def test_augmentation_is_compiled_once(options: dict[str, Any], compile: Compile) -> None:
    function = compile(Augmentation.transform)
    for epoch in range(3):
        expected = augment(Augmentation.transform, options, epoch)
        with torch._dynamo.config.patch(error_on_recompile=epoch > 0):
            found = augment(function, options, epoch)
        assert torch.equal(found, expected)


def test_muon_is_compiled_once_per_group(compile: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(decay: float) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = airbench(10, (8, 8, 8))
        optimizer = build(net, unit_filters=True, iterations=3)
        for step in range(3):
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                take_steps(net, optimizer, 1)
            for group in optimizer.param_groups:
                group["lr"] *= decay
        return dict(net.named_parameters())

    expected = train(0.9)
    function = compile(muon._directions)
    monkeypatch.setattr(muon, "should_compile", lambda choice, tensor: True)
    monkeypatch.setattr(muon, "compiled", lambda eager: function)
    found = train(0.9)
    assert counters["stats"]["unique_graphs"] == 4
    assert all(torch.allclose(found[name], tensor, rtol=0, atol=1e-6) for name, tensor in expected.items())


@pytest.mark.slow
def test_machine_code_has_the_same_random_numbers_and_crops() -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    keys = compiled(sample_keys)(1, 2, INDEX)
    assert torch.equal(keys, sample_keys(1, 2, INDEX))
    assert torch.equal(compiled(crop_and_flip)(IMAGES, keys, 4, True), crop_and_flip(IMAGES, keys, 4, True))
    function = compiled(Augmentation.transform)
    for options in ({}, {"flip": "alternating"}, {"cutout": 8, "crop_padding": 0}):
        found, expected = augment(function, options, 1), augment(Augmentation.transform, options, 1)
        assert torch.equal(found, expected)


def test_objects_that_compile_are_pickled_for_spawned_ranks() -> None:
    compiled(Augmentation.transform)
    pickle.dumps(Augmentation(compile=True))
