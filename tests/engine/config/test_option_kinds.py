"""Each option is declared as experiment or hardware: those of all files in conf/, and of the classes they name."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from src.engine.utils import option_kinds
from src.engine.utils.option_kinds import EXPERIMENT, HARDWARE, kinds, matches
from src.engine.utils.overrides import flatten_config
from src.engine.utils.targets import default_options
from tests.support.choices import names_own_code
from tests.support.runs import CONF

OPTIONAL = ("lightning.pytorch.loggers.MLFlowLogger", "optuna.")  # packages that may be missing; wholesale patterns


def _package(file: Path, conf: Path) -> str:
    """Return the node into which Hydra puts the content of a file."""
    words = [line.split()[2] for line in file.read_text().splitlines() if line.startswith("# @package ")]
    group = file.relative_to(conf).parts[0] if file.parent != conf else "_global_"
    package = words[0] if words else group
    return "" if package == "_global_" else package


def options(conf: Path = CONF) -> set[str]:
    """Return the names of all options: those that a YAML has, and those in the signatures of the classes it names.

    Options of the user's own code need no declaration.
    """
    names: set[str] = set()
    for file in conf.rglob("*.yaml"):
        content = yaml.safe_load(file.read_text())
        if "hydra" in file.relative_to(conf).parts or not isinstance(content, dict) or names_own_code(file):
            continue
        content = {key: value for key, value in content.items() if key not in ("defaults", "hydra")}
        found = flatten_config(content, _package(file, conf))
        names |= found.keys()
        targets = {name.rpartition(".")[0]: value for name, value in found.items() if name.endswith("._target_")}
        for node, target in targets.items():
            if not target.startswith(OPTIONAL):
                names |= {f"{node}.{option}" for option in default_options(target)}
    return {name for name in names if name.rpartition(".")[2] not in ("_partial_", "self")}


def problems(conf: Path = CONF) -> Iterator[str]:
    """Yield what is wrong with the declaration."""
    names = options(conf)
    for name in sorted(names):
        if len(kinds(name)) != 1:
            yield f"{name} is declared as {' and '.join(kinds(name)) or 'nothing'} in {option_kinds.__file__}"
    for pattern in [*EXPERIMENT, *HARDWARE]:
        if not any(matches(name, [pattern.partition("=")[0]]) for name in names):
            yield f"{pattern} matches no option"


def test_each_option_has_one_kind() -> None:
    assert not list(problems())


def test_detects_an_option_without_a_kind(tmp_path: Path) -> None:
    conf = shutil.copytree(CONF, tmp_path / "conf")
    with (conf / "trainer" / "default.yaml").open("a") as stream:
        stream.write("new: 1\n")
    (conf / "callbacks" / "mine.yaml").write_text(
        "# @package callbacks.mine\n_target_: src.engine.observe.timeline.Timeline\n"
    )
    found = [problem.split()[0] for problem in problems(conf)]
    assert found == [
        "callbacks.mine._target_",
        "callbacks.mine.folder",
        "trainer.new",
    ]


def test_detects_a_pattern_of_both_kinds_or_of_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(option_kinds, "HARDWARE", [*HARDWARE, "model.*"])
    assert kinds("model.width") == ["experiment", "hardware"]
    monkeypatch.setitem(globals(), "HARDWARE", [*HARDWARE, "data.nothing"])
    assert list(problems())[-1] == "data.nothing matches no option"
