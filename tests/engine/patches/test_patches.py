"""Private names of other libraries are used in `onecurve/patches/` only."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import onecurve
from onecurve.patches import torch as patched_torch

ENGINE = Path(onecurve.__file__).parent
LIBRARIES = {"hydra", "lightning", "lightning_utilities", "rich", "torch", "torchmetrics", "wandb"}
NOT_PRIVATE = {"_target_", "_replace", "_exit"}  # of Hydra's YAML, of named tuples, of `os`
FILES = [file for file in sorted(ENGINE.rglob("*.py")) if "patches" not in file.parts and file.stem != "__main__"]


def is_private(name: str) -> bool:
    return bool(re.match(r"_[^_]", name)) and name not in NOT_PRIVATE


def names_defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def names_used(tree: ast.AST) -> Iterator[str]:
    """Yield names that a file reads or sets on another object, imports from a library, or gives as a string."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "super()"):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and f"{node.module}".split(".")[0] in LIBRARIES:
            yield from f"{node.module}".split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("attr", "patch.object")):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def touches(text: str) -> set[str]:
    tree = ast.parse(text)
    return {name for name in names_used(tree) if is_private(name)} - set(names_defined(tree))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ENGINE)))
def test_no_other_file_uses_a_private_name(file: Path) -> None:
    assert touches(file.read_text()) == set()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("trainer._signal_connector", {"_signal_connector"}),
        ("from torch._inductor import config", {"_inductor"}),
        ("from hydra.utils import _locate", {"_locate"}),
        ("setattr(module, '_modules', {})", {"_modules"}),
        ("mock.patch.object(module, '_call', f)", {"_call"}),
        ("cfg._target_", set()),
        ("def _own(): ...\nmodule._own()", set()),
    ],
)
def test_private_names_are_found(line: str, found: set[str]) -> None:
    assert touches(line) == found


def classes_with_foreign_bases() -> Iterator[tuple[type, list[type]]]:
    for file in FILES:
        name = ".".join(file.relative_to(ENGINE.parent).with_suffix("").parts).removesuffix(".__init__")
        for kind in vars(importlib.import_module(name)).values():
            if inspect.isclass(kind) and kind.__module__ == name:
                bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] in LIBRARIES]
                if bases:
                    yield kind, bases


def private_names_of(base: type) -> set[str]:
    """Return the private methods of a class, and the private attributes that it reads or sets."""
    try:
        text = inspect.getsource(base)
    except (OSError, TypeError):  # of a class written in C
        return set()
    return set(re.findall(r"(?:self\.|def )(_[a-z]\w*)", text))


def test_no_class_overrides_or_reads_a_private_name_of_its_base() -> None:
    found: dict[str, set[str]] = {}
    for kind, bases in classes_with_foreign_bases():
        used = set(re.findall(r"(?:self\.|super\(\)\.|def |^    )(_[a-z]\w*)", inspect.getsource(kind), re.MULTILINE))
        if names := used & set().union(*map(private_names_of, bases)):
            found[kind.__qualname__] = names
    assert found == {}


def test_every_private_name_has_a_reason() -> None:
    """Functions and classes say it in their docstrings, and names in a comment above or beside them."""
    for file in sorted((ENGINE / "patches").glob("*.py")):
        tree = ast.parse(file.read_text())
        assert ast.get_docstring(tree), file
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert ast.get_docstring(node), (file, node.name)


@pytest.mark.parametrize("fake", [False, True])
def test_memory_of_tensors_is_told_apart(fake: bool) -> None:
    with patched_torch.FakeTensorMode() if fake else torch.inference_mode():
        one, other = torch.zeros(2, 2), torch.zeros(2, 2)
    assert one.untyped_storage() is one.T.untyped_storage()
    assert one.untyped_storage() is not other.untyped_storage()


def test_callbacks_after_a_backward_pass_come_in_order() -> None:
    calls = list[int]()
    x = torch.ones(2, requires_grad=True)

    def request(_: torch.Tensor) -> None:
        patched_torch.call_after_backward(lambda: calls.append(1))
        patched_torch.call_after_backward(lambda: calls.append(2))

    y = x * 2
    y.register_hook(request)
    y.sum().backward()
    assert calls == [1, 2]
