"""Parameter groups, learning-rate scaling and schedules."""

from functools import partial

import pytest
import torch
from torch import nn

from src.optim.groups import build_optimizer, override_hyperparameters, scaling_factor
from src.optim.schedules import constant, cosine, lr_multiplier, multi_step, one_cycle
from src.utils.errors import UserError


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
    with pytest.raises(UserError, match="linear"):
        scaling_factor("lineal", 512, 128)


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


def test_refuses_to_resume_with_another_optimizer() -> None:
    net = nn.Linear(4, 2)
    sgd, adam = (
        build_optimizer(net, partial(kind, lr=0.1), 1.0, "net.") for kind in (torch.optim.SGD, torch.optim.Adam)
    )
    fewer = {"param_groups": sgd.state_dict()["param_groups"][:1]}
    for saved in (adam.state_dict(), fewer):
        with pytest.raises(UserError, match="another `optimizer`"):
            override_hyperparameters(saved, sgd, lambda group: 1.0)


def test_constant_schedule() -> None:
    assert {constant(step, 100) for step in range(100)} == {1.0}
    assert constant(0, 100, warmup=0.1) < constant(5, 100, warmup=0.1) < constant(50, 100, warmup=0.1) == 1.0


def test_multi_step_schedule() -> None:
    factors = [multi_step(step, 10, milestones=[0.3, 0.8], factor=0.1) for step in range(10)]
    assert factors == pytest.approx([1.0] * 3 + [0.1] * 5 + [0.01] * 2)
    assert multi_step(0, 100, [0.5], warmup=0.1) < multi_step(20, 100, [0.5], warmup=0.1) == 1.0
