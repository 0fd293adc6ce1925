"""Properties of the source that every contribution keeps."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def _imports(file: Path) -> set[str]:
    """The modules of src that a file imports when it is itself imported."""
    nodes = ast.parse(file.read_text()).body
    names = {f"{node.module}" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name for name in names if name.startswith("src")}


def test_imports_form_no_circle() -> None:
    graph = {".".join(file.relative_to(ROOT).with_suffix("").parts): _imports(file) for file in SOURCES}
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_knows_no_strategy_outside_its_room(file: Path) -> None:
    if "strategies" not in file.parts:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.If | ast.IfExp):
                assert not re.search(r"strategy\w* (==|in)|isinstance\([^)]*Strategy", ast.unparse(node.test))


def test_files_are_short() -> None:
    assert len((ROOT / "train.py").read_text().splitlines()) < 80
    assert {file.name: lines for file in SOURCES if (lines := file.read_text().count("\n")) > 230} == {}


def test_every_object_configuration_has_a_target() -> None:
    groups = ("data", "model", "module", "optimizer", "scheduler", "strategy", "trainer", "logger")
    for group in groups:
        for file in (ROOT / "conf" / group).glob("*.yaml"):
            text = file.read_text()
            assert "_target_:" in text or "defaults:" in text, file
