"""Options that nothing reads, that a class does not accept, or of a wrong type are refused before anything is built."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import hydra
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from src.engine.config.folder import register_resolvers
from src.engine.config.resolve import refuse_unknown_options
from src.engine.run.experiment import assemble, run
from src.engine.utils.errors import UserError
from src.engine.utils.targets import check_options, check_value
from tests.support.commands import TINY, error_line, run_here
from tests.support.runs import CONF, compose

RECIPES = [f"{group}={file.stem}" for group in ("experiment", "preset", "debug") for file in (CONF / group).iterdir()]


def check(*overrides: str) -> None:
    """Check the options that belong to no class."""
    register_resolvers()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composed = hydra.compose("train", list(overrides), return_hydra_config=True)
        refuse_unknown_options(hydra.compose("train", list(overrides)), composed.hydra.runtime.choices)


def write(folder: Path, recipe: str) -> str:
    """Write a file of conf/experiment, and return the override that adds its folder to the search path."""
    (folder / "experiment").mkdir()
    (folder / "experiment" / "of_test.yaml").write_text(f"{recipe}\n")
    return f"hydra.searchpath=[file://{folder}]"


@pytest.mark.parametrize(
    ("recipe", "hint"),
    [
        ("traner: {max_epochs: 5}", "traner is no option here; did you mean trainer"),
        ("limit_train_batches: 5", "limit_train_batches is no option here; did you mean trainer.limit_train_batches"),
        ("launch: {max_restart: 1}", "launch.max_restart is no option here; did you mean launch.max_restarts"),
        ("max_epochs: 5", "max_epochs is no option here; did you mean trainer.max_epochs?"),
        ("base_lr: 0.2\noptimizer: {lr: '${base}'}", "base_lr is no option here"),
    ],
)
def test_refuses_unknown_keys_of_a_recipe(recipe: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=hint):
        check(write(tmp_path, f"# @package _global_\n{recipe}"), "experiment=of_test")


def test_refuses_a_recipe_without_package(tmp_path: Path) -> None:
    search = write(tmp_path, "trainer: {max_epochs: 5}")
    _, err = run_here(search, "experiment=[quickstart,of_test]", f"run_dir={tmp_path / 'run'}", code=1)
    assert "begin each file of conf/experiment with the line `# @package _global_`" in error_line(err)


@pytest.mark.parametrize(
    "recipe",
    [
        "trainer: {min_epochs: 5}",
        "callbacks: {mine: {_target_: own.Callback}}",
        "logger: {wandb: null}",
        "base_lr: 0.2\noptimizer: {lr: '${base_lr}'}",
        "base_lr: 0.2\noptimizer: {lr: '${oc.select:base_lr,0.1}'}",
        "sizes: {batch: 64}\ndata: {batch_size: '${ sizes.batch }'}",
        "hydra: {sweep: {dir: here}}",
    ],
)
def test_accepts_options_and_variables_of_a_recipe(recipe: str, tmp_path: Path) -> None:
    check(write(tmp_path, f"# @package _global_\n{recipe}"), "experiment=of_test")


@pytest.mark.parametrize("recipe", RECIPES)
def test_accepts_all_recipes(recipe: str) -> None:
    check(recipe.removesuffix(".yaml"))


@pytest.mark.parametrize(
    "words", [["+lr=0.2", "optimizer.lr=${lr}"], ["+callbacks.mine={_target_: own.Mine}"], ["++launch.timeout=9"]]
)
def test_accepts_additions_that_something_reads(words: list[str]) -> None:
    check(*words)


def test_an_option_that_the_data_lack_is_one_line(tmp_path: Path) -> None:
    own = ["data=brackets", "module=brackets", "fit=false", "test=false", f"run_dir={tmp_path / 'run'}"]
    _, err = run_here(*own, code=1)
    assert "Interpolation key 'data.num_classes' not found: set the options that refer to it" in error_line(err)
    run_here(*own, "~model", "~optimizer", "~scheduler")


def test_refuses_a_group_that_names_no_class(small: list[str], folder: Path) -> None:
    _, err = run_here(*small, "~data._target_", f"run_dir={folder}", code=1)
    assert "data has no `_target_`: let its file in conf/data name a class or function" in error_line(err)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.max_epochs=ten"], "trainer.max_epochs=ten: give an integer"),
        (["trainer.max_steps=1.5"], "trainer.max_steps=1.5: give an integer"),
        (["optimizer.nesterov=[1]"], r"optimizer.nesterov=\[1\]: give true or false"),
        (["optimizer.lr=abc"], "optimizer.lr=abc: give a number"),
        (["module.channels_last=no"], "module.channels_last=no: give true or false"),
        (["model=mlp", "model.hidden=a"], "model.hidden=a: give an integer"),
        (["model._target_=src.models."], "model._target_=src.models."),
        (["data.std=[0.5,0.5]"], r"data.std=\[0.5, 0.5\]: give one value for each of the 3 channels"),
        (["+optimizer.lrr=0.1"], "optimizer.lrr: torch.optim.SGD has no option `lrr`; did you mean lr"),
        (["+trainer.max_epoch=1"], "lightning.Trainer has no option `max_epoch`; did you mean max_epochs"),
        (["model._target_=timn.Net"], "model._target_=timn.Net: .*Are you sure that module 'timn' is installed?"),
        (["model._target_=src.models.mlp.mpl"], "'mpl' is importable"),
        (["model._target_=torch.float32"], "model._target_=torch.float32: .* is a dtype; give a class or a function"),
        (["model._target_=src.models"], "model._target_=src.models: .* is a module; give a class or a function"),
        (["+callbacks.mine={_target_: tests.engine.launch.broken.Mine}"], "'not_installed'"),
        (["~model.num_classes"], "model.num_classes is missing, and src.models.*resnet9 has no default for it: add it"),
        (["~optimizer._partial_"], "optimizer.params is missing, .* or `_partial_: true` if code gives it later"),
    ],
)
def test_refuses_options_that_cannot_be_meant(
    words: list[str], message: str, small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import not_installed.part\n")
    monkeypatch.setattr("tests.engine.launch.__path__", [str(tmp_path)])
    with pytest.raises(UserError, match=message) as caught:
        assemble(compose(folder, *small, *words))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["strategy=ddp", "callbacks=[]", "logger=false", "default_root_dir=x", "plugins=[]"])
def test_refuses_arguments_of_the_trainer_that_the_template_gives(word: str, small: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"+trainer.{word}: ")):
        assemble(compose(folder, *small, f"+trainer.{word}"))


def test_an_error_of_lightning_does_not_blame_an_option(
    small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MisconfigurationException("The loader\nis empty.")

    monkeypatch.setattr("src.engine.run.experiment._fit_test_predict", fail)
    with pytest.raises(UserError, match=r"^Lightning refuses this run: The loader is empty\.$"):
        run(compose(folder, *small))


@pytest.mark.parametrize(
    ("value", "hint"),
    [("wrn", bool | Literal["warn"] | None), ("a", int | str), ("a", int | Path), ("a", Callable[[int], int])],
)
def test_a_text_is_refused_only_where_none_fits(value: Any, hint: Any) -> None:
    check_value("option", value, hint)
    with pytest.raises(UserError, match="option=a: give true or false or a number"):
        check_value("option", "a", bool | float | None)


def test_another_class_leaves_out_the_options_of_the_previous_one(small: list[str], tmp_path: Path) -> None:
    """Options on the command line stay, and are refused."""
    task = [*small, *TINY, "logger=none", "trainer.fast_dev_run=true", "optimizer._target_=torch.optim.RMSprop"]
    run_here(*task, f"run_dir={tmp_path / 'run'}")
    _, err = run_here(*task, f"run_dir={tmp_path / 'other'}", "optimizer.nesterov=true", code=1)
    assert "optimizer.nesterov: torch.optim.RMSprop has no option `nesterov`" in error_line(err)


def test_a_recipe_may_set_options_of_parts_that_the_run_leaves_out(small: list[str], tmp_path: Path) -> None:
    search = write(tmp_path, "# @package _global_\nlogger: {wandb: {tags: [a]}}\ncallbacks: {best: {mode: min}}")
    words = [*small, *TINY, "trainer.fast_dev_run=true", "callbacks=none", "logger=none", f"run_dir={tmp_path / 'run'}"]
    out, _ = run_here(*words, search, "experiment=of_test")
    assert "logger.wandb has options (tags), but is left out" in out


def test_a_class_may_complete_its_parts_itself() -> None:
    part = {"_target_": "torch.optim.SGD", "lr": 0.1}  # without its parameters
    check_options(OmegaConf.create({"own": {"_target_": "types.SimpleNamespace", "_recursive_": False, "part": part}}))
    with pytest.raises(UserError, match=r"own\.part\.params is missing"):
        check_options(OmegaConf.create({"own": {"_target_": "types.SimpleNamespace", "part": part}}))
