"""Rules of the source code that every contribution keeps."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


LAYERS = [  # from the top down: a folder of src/ imports from those below it, and from itself
    "cli",  # the command line and its output
    "sweeps",  # jobs of a multirun
    "doctor",  # checks before a run
    "launch",  # starts the ranks
    "run",  # one run on one rank
    "report",  # report.html, from the files of run folders
    "callbacks",
    "strategies",
    "models",
    "data",
    "optim",
    "checkpoint",
    "loggers",
    "utils",
]


def _module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def _imports(file: Path) -> set[str]:
    """Return the modules of src that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = f"{node.module}"
            is_package = (ROOT / module.replace(".", "/")).is_dir()
            names |= {f"{module}.{alias.name}" for alias in node.names} if is_package else {module}
    return {name for name in names if name.startswith("src.")}


def test_every_folder_has_a_layer() -> None:
    assert sorted(LAYERS) == sorted(
        folder.name for folder in (ROOT / "src").iterdir() if (folder / "__init__.py").exists()
    )


@pytest.mark.parametrize("file", [file for file in SOURCES if file.parent.name != "src"], ids=_module)
def test_imports_only_from_layers_below(file: Path) -> None:
    layer = LAYERS.index(_module(file).split(".")[1])
    above = {name for name in _imports(file) if LAYERS.index(name.split(".")[1]) < layer}
    assert not above


def test_plugins_import_only_sweeps_and_below() -> None:
    above = LAYERS[: LAYERS.index("sweeps")]
    for file in (ROOT / "hydra_plugins").glob("*.py"):
        assert not {name for name in _imports(file) if name.split(".")[1] in above}


def test_scripts_are_modules() -> None:
    """They run from the repository root, so none edits the search path."""
    assert not [file for file in (ROOT / "scripts").rglob("*.py") if "sys.path" in file.read_text()]


def test_imports_form_no_cycle() -> None:
    graph = {_module(file): _imports(file) for file in SOURCES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_only_strategies_know_strategies(file: Path) -> None:
    if "strategies" not in file.parts:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.If | ast.IfExp):
                assert not re.search(r"strategy\w* (==|in)|isinstance\([^)]*Strategy", ast.unparse(node.test))


def test_files_are_short() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) < 80
    assert {file.name: lines for file in SOURCES if (lines := file.read_text().count("\n")) > 400} == {}


def test_every_object_configuration_has_a_target() -> None:
    groups = ("data", "model", "module", "optimizer", "scheduler", "strategy", "trainer", "logger")
    for group in groups:
        for file in (ROOT / "conf" / group).glob("*.yaml"):
            text = file.read_text()
            assert "_target_:" in text or "defaults:" in text or file.stem == "none", file
