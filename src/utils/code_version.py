"""A hash of the source code of classes, by which a run knows that a network was edited."""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

from src.utils.targets import locate

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)  # nodes that can have a docstring
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def code_version(targets: Iterable[str]) -> str:
    """Return a hash of the source files of classes and functions, without comments and docstrings.

    A file counts with the files of its own folder and the folders in it that it imports at its top level. Installed
    libraries do not count.
    """
    names: set[str] = set()
    for target in targets:
        name = locate("_target_", target).__module__
        names |= _with_imports(name, name.rpartition(".")[0], set())
    return hashlib.sha256("".join(f"{name}\n{_source(name)[0]}\n" for name in sorted(names)).encode()).hexdigest()


def _with_imports(name: str, package: str, found: set[str]) -> set[str]:
    """Return `found` with a module and the modules of the package that it imports, directly or not."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if name not in found and file.endswith(".py") and not file.startswith(_LIBRARIES):
        found.add(name)
        for imported in _source(name)[1]:
            if imported.startswith(f"{package}."):
                _with_imports(imported, package, found)
    return found


@cache
def _source(name: str) -> tuple[str, list[str]]:
    """Return the code of an imported module, and the names that may be modules among those that it imports."""
    module = sys.modules[name]
    tree = ast.parse(Path(f"{module.__file__}").read_text())
    imported: list[str] = []
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom):
            base = resolve_name("." * statement.level + (statement.module or ""), module.__package__)
            imported += [base, *(f"{base}.{alias.name}" for alias in statement.names)]
        elif isinstance(statement, ast.Import):
            imported += [alias.name for alias in statement.names]
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree), imported
