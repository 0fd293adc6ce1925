"""Parameter groups, learning-rate scaling and schedules."""

import copy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from onecurve.checkpoint.optimizer_state import shard
from onecurve.optim import groups
from onecurve.optim.groups import build_optimizer, scaling_factor
from onecurve.optim.schedules import (
    constant,
    cosine,
    lr_multiplier,
    multi_step,
    one_cycle,
)
from onecurve.run.module import Module
from tests.support.runs import compose, fit


def test_only_matrices_decay_and_every_parameter_is_named() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    factory = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    decayed, kept = build_optimizer(net, factory, lr_factor=2.0, prefix="net.").param_groups
    assert decayed["param_names"] == ["net.0.weight", "net.3.weight"]
    assert kept["param_names"] == ["net.0.bias", "net.1.weight", "net.1.bias", "net.3.bias"]
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.5, 0.0)
    assert decayed["lr"] == kept["lr"] == 0.2


def test_learning_rate_scaling_rules() -> None:
    assert scaling_factor("linear", 512, 128) == 4
    assert scaling_factor("sqrt", 512, 128) == 2
    assert scaling_factor("none", 512, 128) == 1


@pytest.mark.parametrize("schedule", [cosine, one_cycle])
def test_schedules_rise_and_fall(schedule: object) -> None:
    factors = [schedule(step, 100) for step in range(100)]  # type: ignore[operator]
    top = factors.index(max(factors))
    assert 0 < factors[0] < 0.5
    assert factors[top] == pytest.approx(1, abs=0.05)
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    assert 0 <= factors[-1] < 0.02
    assert schedule(150, 100) >= 0  # type: ignore[operator]
    assert 0 < schedule(0, 1) <= 1  # type: ignore[operator]


def test_group_schedule_can_span_a_fraction_of_the_run() -> None:
    def factors(group: dict[str, float]) -> list[float]:
        return [lr_multiplier(partial(one_cycle, warmup=0.0), group, step, 8) for step in range(8)]

    assert factors({}) == pytest.approx([1 - step / 8 for step in range(8)])
    assert factors({"schedule_fraction": 0.5}) == pytest.approx([1, 0.75, 0.5, 0.25, 0, 0, 0, 0])
    assert [lr_multiplier(constant, {"schedule_fraction": 0.5}, step, 4) for step in range(4)] == [1, 1, 0, 0]


def test_constant_schedule() -> None:
    assert {constant(step, 100) for step in range(100)} == {1.0}
    assert constant(0, 100, warmup=0.1) < constant(5, 100, warmup=0.1) < constant(50, 100, warmup=0.1) == 1.0


def test_multi_step_schedule() -> None:
    factors = [multi_step(step, 10, milestones=[0.3, 0.8], factor=0.1) for step in range(10)]
    assert factors == pytest.approx([1.0] * 3 + [0.1] * 5 + [0.01] * 2)
    assert multi_step(0, 100, [0.5], warmup=0.1) < multi_step(20, 100, [0.5], warmup=0.1) == 1.0


@pytest.mark.parametrize(
    ("kind", "options", "allowed", "expected"),
    [
        (torch.optim.SGD, {}, True, True),
        (torch.optim.AdamW, {}, True, True),
        (torch.optim.Adagrad, {}, True, None),  # older versions of torch fuse it on CPUs only
        (torch.optim.SGD, {}, False, None),
        (torch.optim.SGD, {"fused": False}, True, False),
        (torch.optim.AdamW, {"foreach": True}, True, None),
        (torch.optim.RMSprop, {}, True, None),  # torch has no fused implementation
    ],
)
def test_optimizers_are_fused_on_cuda(
    kind: Any, options: dict[str, bool], allowed: bool, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU plays the part of a GPU, since its fused implementations have the same interface."""

    def fused() -> bool | None:
        optimizer = build_optimizer(nn.Linear(4, 2), partial(kind, lr=0.1, **options), 1.0, "net.", allowed)
        return optimizer.param_groups[0].get("fused")

    assert fused() == options.get("fused"), "the default on a CPU is torch's own"
    monkeypatch.setattr(groups, "_FUSED_DEVICES", ("cpu",))
    assert fused() == expected


@pytest.mark.parametrize(
    ("precision", "clip", "zero", "allowed"),
    [
        ("16-mixed", None, False, True),
        ("bf16-mixed", 1.0, False, True),
        ("16-mixed", 1.0, False, False),
        ("32-true", None, True, False),
    ],
)
def test_fused_optimizers_neither_clip_scaled_gradients_nor_shard_their_state(
    precision: str, clip: float | None, zero: bool, allowed: bool
) -> None:
    strategy = SimpleNamespace(shard_optimizer=zero)
    trainer = SimpleNamespace(precision=precision, gradient_clip_val=clip, strategy=strategy)
    assert cast(Any, Module.allows_fused_optimizer).fget(SimpleNamespace(trainer=trainer)) == allowed


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("was_fused", [True, False])
def test_optimizer_state_travels_between_fused_and_other_implementations(kind: Any, was_fused: bool) -> None:
    def build(fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Linear(4, 2)
        return net, build_optimizer(net, partial(kind, lr=0.1, fused=fused), 1.0, "net.")

    def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        net(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()

    (net, first), (other, second) = build(was_fused), build(not was_fused)
    step(net, first)
    other.load_state_dict(net.state_dict())
    second.load_state_dict(shard(copy.deepcopy(first.state_dict()), second))
    assert [group["fused"] for group in second.param_groups] == [not was_fused] * 2
    other.zero_grad()
    net.zero_grad()
    step(net, first)
    step(other, second)
    assert all(torch.allclose(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_zero_resumes_a_run_with_a_fused_optimizer(
    small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = [*small, "model=mlp", "model.hidden=[8]", "optimizer=adamw", "trainer.limit_train_batches=2"]
    task += ["scheduler=torch", "scheduler.scheduler._target_=torch.optim.lr_scheduler.ConstantLR", "strategy=ddp"]
    monkeypatch.setattr(groups, "_FUSED_DEVICES", ("cpu",))

    def fused() -> set[bool | None]:
        saved = torch.load(folder / "checkpoints" / "last.ckpt")["optimizer_states"][0]
        return {group["fused"] for group in saved["param_groups"]}

    fit(compose(folder, *task, "trainer.max_epochs=1"))
    assert fused() == {True}
    resumed = ["trainer.max_epochs=2", f"ckpt_path={folder}/checkpoints/last.ckpt"]
    fit(compose(folder, *task, *resumed, "strategy.shard_optimizer=true"))
    assert fused() == {None}
