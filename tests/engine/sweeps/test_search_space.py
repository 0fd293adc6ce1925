"""Optuna's distributions for Hydra's sweep syntax."""

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from src.engine.sweeps.search_space import search_space, with_params


def space(*overrides: str) -> tuple[dict[str, Any], list[str]]:
    return search_space(OverridesParser.create().parse_overrides(list(overrides)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("interval(0.1,2)", FloatDistribution(0.1, 2.0)),
        ("tag(log,interval(0.1,2))", FloatDistribution(0.1, 2.0, log=True)),
        ("int(interval(1,9))", IntDistribution(1, 9)),
        ("range(1,6,2)", IntDistribution(1, 5, step=2)),
        ("range(1,2)", IntDistribution(1, 1)),
        ("a,b", CategoricalDistribution(["a", "b"])),
    ],
)
def test_sweep_syntax(values: str, expected: Any) -> None:
    assert space(f"x={values}", "y=3") == ({"x": expected}, ["y=3"])


def test_the_command_line_precedes_a_recipe() -> None:
    params = {"optimizer.lr": "interval(0.1,2)", "model.width": "choice(8,16)"}
    overrides = with_params(params, ["model.width=8", "seed=0"])
    assert overrides == ["optimizer.lr=interval(0.1,2)", "model.width=8", "seed=0"]
