"""Options that nothing reads, that a class does not accept, or of a wrong type are refused before anything is built."""

import re
from pathlib import Path
from typing import Any, Literal

import hydra
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from src.engine.config.build import check_numbers, check_options
from src.engine.config.resolve import refuse_unknown_options, refuse_unused_groups
from src.engine.config.resolvers import register_resolvers
from src.engine.run.experiment import assemble, run
from src.engine.utils.errors import UserError
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
        ("max_epochs: 5", "max_epochs is no option here; did you mean trainer.max_epochs?"),
        ("launch: {max_restart: 1}", "launch.max_restart is no option here; did you mean launch.max_restarts"),
        ("trainer.max_epochs: 5", "trainer.max_epochs is no option here; nest the keys"),
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


@pytest.mark.parametrize("group", ["data", "model", "module", "optimizer", "scheduler", "strategy", "trainer"])
def test_refuses_a_group_that_names_no_class(group: str, tmp_path: Path) -> None:
    search = write(tmp_path, f"# @package _global_\n{group}: null")
    _, err = run_here(search, "experiment=of_test", f"run_dir={tmp_path / 'run'}", code=1)
    assert f"{group} has no `_target_`: let its file in conf/{group} name a class or function" in error_line(err)


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


def test_a_module_needs_no_model_of_the_template(tmp_path: Path) -> None:
    own = ["data=brackets", "module=brackets", "fit=false", "test=false", f"run_dir={tmp_path / 'run'}"]
    _, err = run_here(*own, code=1)
    left_out = error_line(err).partition("BracketClassifier does not use: ")[2].split()
    assert left_out == ["~model", "~optimizer", "~scheduler"]
    run_here(*own, *left_out)


@pytest.mark.parametrize("override", ["model=vit", "model.width=4", "scheduler=cosine", "scheduler.warmup=0.1"])
def test_refuses_options_that_the_module_does_not_use(override: str, folder: Path) -> None:
    group = re.split("[.=]", override)[0]
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra.compose("train", ["experiment=gan", override])
    with pytest.raises(UserError, match=f"{override}: src.models.gan.GAN does not use `{group}`"):
        refuse_unused_groups(cfg, ["experiment=gan", override])


def test_accepts_options_that_the_module_uses_in_part() -> None:
    cfg = OmegaConf.create({"module": {"_target_": "own.Module", "width": "${model.width}"}, "model": {"width": 3}})
    refuse_unused_groups(cfg, ["model.width=3", "seed=1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.max_epochs=ten"], "trainer.max_epochs=ten: give an integer"),
        (["trainer.gradient_clip_val=abc"], "trainer.gradient_clip_val=abc: give an integer or a number"),
        (["optimizer.lr=abc"], "optimizer.lr=abc: give a number"),
        (["module.channels_last=yes"], "module.channels_last=yes: give true or false"),
        (["model=mlp", "model.hidden=[a]"], "model.hidden=a: give an integer"),
        (["data.mean=0.5"], "data.mean=0.5: give a list"),
        (["strategy=ddp", "strategy.shares=3"], "strategy.shares=3: give a list"),
        (["model._target_=src.models."], "model._target_=src.models."),
        (["data.std=[0.5,0.5]"], r"data.std=\[0.5, 0.5\]: give one value for each of the 3 channels"),
        (["+optimizer.lrr=0.1"], "optimizer.lrr=0.1: torch.optim.SGD has no option `lrr`; .* did you mean lr"),
        (["+trainer.max_epoch=1"], "lightning.Trainer has no option `max_epoch`; .* did you mean max_epochs"),
        (["model._target_=timn.Net"], "model._target_=timn.Net: .*Are you sure that module 'timn' is installed?"),
        (["model._target_=src.models.mlp.mpl"], r"'mpl' is importable .* Did you mean src.models.mlp.mlp\?$"),
        (["model._target_=src.modles.mlp.mlp"], r"Did you mean src.models\?$"),
        (["model._target_=torch.float32"], "model._target_=torch.float32: .* is a dtype; give a class or a function"),
        (["model._target_=src.models"], "model._target_=src.models: .* is a module; give a class or a function"),
        (["model._target_=tests.engine.launch.lenient.net"], r"unexpected keyword argument '(\w+)'.*leave `\1` out"),
        (["+callbacks.mine={_target_: tests.engine.launch.broken.Mine}"], r"'not_installed'.*'tests.engine.launch'\?$"),
        (["model=mlp", "~model.num_classes"], "model: src.models.mlp.mlp needs `num_classes`: set model.num_classes"),
        (["+callbacks.mine={_target_: operator.add, _partial_: false}"], "callbacks.mine: .*operator.add needs `a`"),
    ],
)
def test_refuses_options_that_cannot_be_meant(
    words: list[str], message: str, small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import not_installed.part\n")
    (tmp_path / "lenient.py").write_text("def inner(): ...\ndef net(**options): return inner(**options)\n")
    monkeypatch.setattr("tests.engine.launch.__path__", [str(tmp_path)])
    with pytest.raises(UserError, match=message) as caught:
        assemble(compose(folder, *small, *words))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", ["_args_: [1, 2]", "_partial_: true"])
def test_accepts_arguments_by_position_and_with_the_call(options: str, small: list[str], folder: Path) -> None:
    check_options(compose(folder, *small, f"+callbacks.mine={{_target_: src.engine.uniform, {options}}}"))


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
    ("value", "hint", "fits"),
    [
        (1, float, True),
        (1.0, int, False),
        ("a", float | torch.Tensor, False),
        ([1.0], float | torch.Tensor, False),
        ("wrn", bool | Literal["warn"] | None, True),
        ([1, "a"], list[int | str], True),
        ([0.9, "a"], list[float], False),
        (0.9, list[float], False),
        ([0.9, "a"], tuple[float, ...] | None, False),
        ([0.9, "a"], tuple[float, str], True),
        ([0.9, "a"], list[float] | str, True),
        ([0.9], list, True),
        ("a", int | str | dict[str, int], True),
        ({"a": 1}, int | dict[str, int], True),
        ("a", int | Path, True),
        ("a", Any, True),
        (None, int, True),
    ],
)
def test_only_certain_mistakes_are_refused(value: Any, hint: Any, fits: bool) -> None:
    if fits:
        check_numbers("option", value, hint)
    else:
        with pytest.raises(UserError, match=r"^option=.*: give "):
            check_numbers("option", value, hint)


def test_another_class_leaves_out_the_options_of_the_previous_one(small: list[str], tmp_path: Path) -> None:
    """Also when the run is continued; options on the command line stay, and are refused."""
    task = [*small, *TINY, "logger=none", "trainer.max_epochs=1", "optimizer._target_=torch.optim.RMSprop"]
    folder = f"run_dir={tmp_path / 'run'}"
    notice = "optimizer: torch.optim.RMSprop has no nesterov, which conf/optimizer sets: left out"
    _, err = run_here(*task, folder)
    assert notice in err.splitlines()
    _, err = run_here(f"ckpt_path={tmp_path / 'run'}", "trainer.max_epochs=2")
    assert notice in err
    _, err = run_here(*task, f"{folder}2", "optimizer.nesterov=true", code=1)
    assert "optimizer.nesterov=true: torch.optim.RMSprop has no option `nesterov`" in error_line(err)


@pytest.mark.parametrize(("word", "status"), [("logger=none", 0), ("logger=none +logger.wandb.notes=b", 1)])
def test_a_recipe_may_set_options_of_parts_that_the_run_leaves_out(
    word: str, status: int, small: list[str], tmp_path: Path
) -> None:
    """Options on the command line are refused."""
    search = write(tmp_path, "# @package _global_\nlogger: {wandb: {tags: [a]}}\ncallbacks: {best: {mode: min}}")
    run_dir = f"run_dir={tmp_path / 'run'}"
    words = [*small, *TINY, "trainer.fast_dev_run=true", "callbacks=none", search, "experiment=of_test", run_dir]
    _, err = run_here(*words, *word.split(), code=status)
    assert status == 0 or "logger.wandb has options (tags, notes) but no _target_" in error_line(err)
