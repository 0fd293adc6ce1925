"""Options that nothing reads, that a class does not accept, or of a wrong type are refused before anything is built."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import hydra
import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf

from onecurve.config.folder import register_resolvers, saved_config
from onecurve.config.resolve import _changed_options, _warn_of_unused_options, refuse_unknown_options
from onecurve.errors import UserError
from onecurve.run.experiment import run_experiment
from onecurve.targets import check_options, check_value, locate
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
    "recipe",
    [
        "trainer: {min_epochs: 5}",
        "callbacks: {mine: {_target_: own.Callback}}",
        "logger: {wandb: null}",
        "base_lr: 0.2\noptimizer: {lr: '${base_lr}'}",
        "base_lr: 0.2\noptimizer: {lr: '${oc.select:base_lr,0.1}'}",
        "sizes: {batch: 64}\ndata: {batch_size: '${ sizes.batch }'}",
        "hydra: {sweep: {dir: here}}",
        "callbacks: {mine: {_target_: own.Mine}}",
        "launch: {timeout: 9}",
    ],
)
def test_accepts_options_and_variables_of_a_recipe(recipe: str, tmp_path: Path) -> None:
    check(write(tmp_path, f"# @package _global_\n{recipe}"), "experiment=of_test")


@pytest.mark.parametrize("recipe", RECIPES)
def test_accepts_all_recipes(recipe: str) -> None:
    check(recipe.removesuffix(".yaml"))


def test_changes_are_the_overrides_and_then_what_the_recipe_and_its_base_set() -> None:
    """resnet50 chooses its model, and has the other options of resnet18."""
    assert _changed_options(["experiment=resnet50", "+trainer.max_epochs=1", "virtual_ranks=2"]) == [
        "experiment=resnet50",
        "+trainer.max_epochs=1",
        "virtual_ranks=2",
        "model=resnet50",
        "scheduler=multi_step",
    ]
    assert _changed_options(["debug=of_nobody"]) == ["debug=of_nobody"]
    assert _changed_options([]) == []


def test_an_option_that_the_data_lack_is_one_line(tmp_path: Path) -> None:
    own = ["data=brackets", "module=brackets", "fit=false", "test=false", f"run_dir={tmp_path / 'run'}"]
    _, err = run_here(*own, code=1)
    assert "model.num_classes is that of data.num_classes, which this configuration lacks: set" in error_line(err)
    assert "~model" in error_line(err)
    run_here(*own, "~model", "~optimizer", "~scheduler")


def test_an_error_of_lightning_does_not_blame_an_option(
    small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MisconfigurationException("The loader\nis empty.")

    monkeypatch.setattr("lightning.Trainer.fit", fail)
    with pytest.raises(UserError, match=r"^Lightning refuses this run: The loader is empty\.$"):
        run_experiment(compose(folder, *small))


@pytest.mark.parametrize(
    ("value", "hint"),
    [("wrn", bool | Literal["warn"] | None), ("a", int | str), ("a", int | Path), ("a", Callable[[int], int])],
)
def test_a_text_is_refused_only_where_none_fits(value: Any, hint: Any) -> None:
    check_value("option", value, hint)
    with pytest.raises(UserError, match="option=a: give true or false or a number"):
        check_value("option", "a", bool | float | None)


@pytest.mark.parametrize("hint", [Sequence[int], Sequence[int] | None, list[int]])
@pytest.mark.parametrize(
    ("value", "is_list"), [([3, 1], True), (None, True), (3, False), ([3, "a"], False), ("a", False)]
)
def test_a_list_of_numbers_is_one(value: Any, is_list: bool, hint: Any) -> None:
    with nullcontext() if is_list else pytest.raises(UserError, match="give a list, each an integer"):
        check_value("option", value, hint)


def test_another_class_leaves_out_the_options_of_the_previous_one(small: list[str], tmp_path: Path) -> None:
    """Options on the command line stay, and are refused; one that names another option has its value."""
    task = [*small, *TINY, "logger=none", "trainer.max_steps=1", "optimizer._target_=torch.optim.RMSprop"]
    run_here(*task, f"run_dir={tmp_path / 'run'}", "seed=${data.batch_size}")
    assert "seed=32" in saved_config(tmp_path / "run").runtime.overrides
    _, err = run_here(*task, f"run_dir={tmp_path / 'other'}", "optimizer.nesterov=true", code=1)
    assert "optimizer.nesterov: torch.optim.RMSprop has no option `nesterov`" in error_line(err)


def test_a_recipe_may_set_options_of_parts_that_the_run_leaves_out(small: list[str], tmp_path: Path) -> None:
    search = write(tmp_path, "# @package _global_\nlogger: {wandb: {tags: [a]}}\ncallbacks: {best: {mode: min}}")
    words = [*small, *TINY, "trainer.max_steps=1", "callbacks=none", "logger=none", f"run_dir={tmp_path / 'run'}"]
    out, _ = run_here(*words, search, "experiment=of_test")
    assert "logger.wandb has options (tags), but is left out" in out


def test_a_class_may_complete_its_parts_itself() -> None:
    part = {"_target_": "torch.optim.SGD", "lr": 0.1}  # without its parameters
    check_options(OmegaConf.create({"own": {"_target_": "types.SimpleNamespace", "_recursive_": False, "part": part}}))
    with pytest.raises(UserError, match=r"own\.part\.params is missing"):
        check_options(OmegaConf.create({"own": {"_target_": "types.SimpleNamespace", "part": part}}))


@pytest.mark.parametrize(
    ("module", "words", "warned"),
    [
        ("brackets", ["optimizer.lr=1", "seed=1", "+optimizer.eps=1"], "optimizer.lr=1 +optimizer.eps=1"),
        ("brackets", ["model=mlp"], "model=mlp"),
        ("brackets", ["optimizer=null"], ""),
        ("classifier", ["optimizer.lr=1", "model=mlp"], ""),
        ("gan", ["scheduler=none"], "scheduler=none"),
    ],
)
def test_options_that_a_module_does_not_take(
    module: str, words: list[str], warned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = OmegaConf.load(CONF / "module" / f"{module}.yaml")
    groups = {name: {"lr": 0.1} for name in ("optimizer", "scheduler", "model")}
    _warn_of_unused_options(OmegaConf.create({"module": cfg, **groups}), words)
    warnings = capsys.readouterr().err
    assert warnings.startswith(f"warning: {warned}: no effect, " if warned else "")
    assert warnings.count("\n") == bool(warned)


def test_a_bug_in_the_file_of_a_class_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with_a_bug.py").write_text("raise ValueError('of the file')")
    (tmp_path / "without_a_package.py").write_text("import of_nobody")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="of the file"):
        locate("model._target_", "with_a_bug.Net")
    with pytest.raises(UserError, match=r"model._target_=without_a_package.Net: No module named 'of_nobody'"):
        locate("model._target_", "without_a_package.Net")
    assert locate("model._target_", "collections.abc.Mapping.get") is Mapping.get
