"""Options that a class does not accept, or of a wrong type, are found before anything is built."""

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from src.run.experiment import assemble, run
from src.run.option_checks import _check_type
from src.utils.errors import UserError
from tests.support.commands import TINY, error_line, run_here
from tests.support.runs import compose


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.max_epochs=ten"], "trainer.max_epochs=ten: give an integer or null"),
        (["trainer.gradient_clip_val=abc"], "trainer.gradient_clip_val=abc: give a number or null"),
        (["optimizer.lr=abc"], "optimizer.lr=abc: give a number"),
        (["module.channels_last=yes"], "module.channels_last=yes: give true or false"),
        (["model=mlp", "model.hidden=[a]"], r"model.hidden=\['a'\]: give a list, each element an integer"),
        (["data.mean=0.5"], "data.mean=0.5: give a list, each element a number"),
        (["data.std=[0.5,0.5]"], r"data.std=\[0.5, 0.5\]: give one value for each of the 3 channels"),
        (["+optimizer.lrr=0.1"], "optimizer.lrr=0.1: torch.optim.SGD has no option `lrr`; .* did you mean lr"),
        (["+trainer.max_epoch=1"], "lightning.Trainer has no option `max_epoch`; .* did you mean max_epochs"),
        (
            ["model._target_=timn.Net"],
            "model._target_=timn.Net: there is no package `timn`; install it .pip install",
        ),
        (["model._target_=src.models.mlp.mpl"], "src.models.mlp has no mpl; did you mean mlp"),
        (["model._target_=torch.float32"], "model._target_=torch.float32: .* is a dtype; give a class or a function"),
        (["model._target_=src.models"], "model._target_=src.models: .* is a module; give a class or a function"),
        (["+callbacks.mine={_target_: tests.launch.broken.Mine}"], "there is no package `not_installed`"),
    ],
)
def test_refuses_options_that_cannot_be_meant(
    words: list[str], message: str, small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import not_installed.part\n")
    monkeypatch.setattr("tests.launch.__path__", [str(tmp_path)])
    with pytest.raises(UserError, match=message):
        assemble(compose(folder, *small, *words))


@pytest.mark.parametrize("word", ["strategy=ddp", "callbacks=[]", "logger=false", "default_root_dir=x", "plugins=[]"])
def test_refuses_arguments_of_the_trainer_that_the_template_gives(word: str, small: list[str], folder: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"+trainer.{word}: ")):
        assemble(compose(folder, *small, f"+trainer.{word}"))


def test_an_error_of_lightning_does_not_blame_an_option(
    small: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MisconfigurationException("The loader\nis empty.")

    monkeypatch.setattr("src.run.experiment._fit_test_predict", fail)
    with pytest.raises(UserError, match=r"^Lightning refuses this run: The loader is empty\.$"):
        run(compose(folder, *small))


@pytest.mark.parametrize(
    ("value", "hint", "fits"),
    [
        (1, float, True),
        (1.0, int, False),
        ("a", float | torch.Tensor, False),
        ([1.0], float | torch.Tensor, False),
        ("warn", bool | Literal["warn"] | None, True),
        ("wrn", bool | Literal["warn"] | None, False),
        ([1, "a"], list[int | str], True),
        ([0.9, "a"], tuple[float, ...], False),
        ("a", int | str | dict[str, int], True),
        ({"a": 1}, int | dict[str, int], True),
        ("a", int | Path, True),
        ("a", torch.nn.Module, True),
        ("a", Any, True),
        (None, int, True),
    ],
)
def test_only_certain_mistakes_are_refused(value: Any, hint: Any, fits: bool) -> None:
    if fits:
        _check_type("option", value, hint)
    else:
        with pytest.raises(UserError, match=r"^option=.*: give "):
            _check_type("option", value, hint)


def test_another_class_leaves_out_the_options_of_the_previous_one(small: list[str], tmp_path: Path) -> None:
    """Also when the run is continued; options on the command line stay, and are refused."""
    task = [*small, *TINY, "logger=none", "trainer.max_epochs=1", "optimizer._target_=torch.optim.RMSprop"]
    folder = f"run_dir={tmp_path / 'run'}"
    notice = "optimizer: torch.optim.RMSprop has no option nesterov, which conf/optimizer sets: left out"
    _, err = run_here(*task, folder)
    assert notice in err.splitlines()
    _, err = run_here(f"ckpt_path={tmp_path / 'run'}", "trainer.max_epochs=2")
    assert notice in err
    _, err = run_here(*task, f"{folder}2", "optimizer.nesterov=true", code=1)
    assert "optimizer.nesterov=true: torch.optim.RMSprop has no option `nesterov`" in error_line(err)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("fit=yes", ": give true or false"),
        ("launch.max_restarts=abc", ": give an integer"),
    ],
)
def test_types_of_the_launchers_options(word: str, hint: str, tmp_path: Path) -> None:
    _, err = run_here(word, f"run_dir={tmp_path / 'run'}", code=1)
    assert f"{word}{hint}" in error_line(err)
