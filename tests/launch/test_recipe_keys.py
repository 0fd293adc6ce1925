"""Keys in the files of `experiment`, `preset` and `debug` are checked as options of the command line are."""

from pathlib import Path

import hydra
import pytest

from src.run.option_checks import is_variable, refuse_unknown_keys
from src.sweeps.resolvers import register_resolvers
from src.utils.errors import UserError
from tests.support.commands import error_line, run_here
from tests.support.runs import CONF

RECIPES = [(group, file.stem) for group in ("experiment", "preset", "debug") for file in (CONF / group).glob("*.yaml")]


def check(*overrides: str) -> None:
    register_resolvers()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("train", list(overrides), return_hydra_config=True)
        refuse_unknown_keys(cfg, cfg.hydra)


def write(folder: Path, **recipes: str) -> str:
    """Write files of conf/experiment, and return the override that adds their folder to the search path."""
    (folder / "experiment").mkdir()
    for name, text in recipes.items():
        (folder / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    return f"hydra.searchpath=[file://{folder}]"


@pytest.mark.parametrize(
    ("recipe", "hint"),
    [
        ("traner: {max_epochs: 5}", "traner is no option here; did you mean trainer"),
        ("max_epochs: 5", "max_epochs is no option here; did you mean trainer.max_epochs?"),
        ("launch: {max_restart: 1}", "launch.max_restart is no option here; did you mean launch.max_restarts"),
        ("trainer: {min_epoch: 5}", "trainer.min_epoch is no option here; did you mean trainer.min_epochs"),
        ("trainer.max_epochs: 5", "trainer.max_epochs is no option here; nest the keys"),
        ("base_lr: 0.2\noptimizer: {lr: '${base}'}", "base_lr is no option here"),
        ("trainer: {base: 5, max_epochs: '${base}'}", "trainer.base is no option here"),
        ("optimizer: {_target_: torch.optim.Adagrad, mu: 1}", "optimizer.mu is no option here"),
    ],
)
def test_refuses_unknown_keys(recipe: str, hint: str, tmp_path: Path) -> None:
    """The recipe is one of a list, and the parent of another."""
    search = write(tmp_path, parent=recipe, mine="defaults:\n  - parent\nseed: 3")
    _, err = run_here(search, "experiment=[quickstart,mine]", f"run_dir={tmp_path / 'run'}", code=1)
    assert f"{tmp_path}/experiment/parent.yaml: {hint}" in error_line(err)


def test_refuses_a_recipe_without_package(tmp_path: Path) -> None:
    search = write(tmp_path, mine="")
    (tmp_path / "experiment" / "mine.yaml").write_text("trainer: {max_epochs: 5}\n")
    with pytest.raises(UserError, match=r"mine\.yaml: begin it with the line"):
        check(search, "experiment=mine")


@pytest.mark.parametrize(
    "recipe",
    [
        "trainer: {min_epochs: 5}",
        "callbacks: {mine: {_target_: own.Callback}}",
        "defaults:\n  - override /optimizer: adamw\noptimizer: {eps: 1.0e-7, betas: [0.5, 0.9]}",
        "model: {_target_: torch.nn.LazyLinear, out_features: 3}",
        "logger: {wandb: null}",
        "base_lr: 0.2\noptimizer: {lr: '${base_lr}'}",
        "sizes: {batch: 64}\ndata: {batch_size: '${sizes.batch}'}",
        "hydra: {sweep: {dir: here}}",
    ],
)
def test_accepts_options_and_arguments(recipe: str, tmp_path: Path) -> None:
    check(write(tmp_path, mine=recipe), "experiment=mine")


@pytest.mark.parametrize(("group", "name"), RECIPES)
def test_accepts_all_recipes(group: str, name: str) -> None:
    check(f"{group}={name}")


@pytest.mark.parametrize("value", ["${base_lr}", "${oc.select:base_lr,0.1}", "${..base_lr}", "${ base_lr }"])
def test_variables_are_read_in_any_form(value: str) -> None:
    assert is_variable("base_lr", {"optimizer": {"lr": value}})
    assert not is_variable("lr", {"optimizer": {"lr": value}})
