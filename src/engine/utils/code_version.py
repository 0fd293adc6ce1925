"""A hash of the source code of classes, by which a run knows that its network was edited."""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from src.engine.utils.targets import locate

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)  # nodes that can have a docstring
_ENGINE = ("src.engine.determinism.", "src.engine.run.module")  # what of the engine computes the experiment
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def code_version(targets: Iterable[str]) -> str:
    """Return a hash of the source files of classes and functions, without comments and docstrings.

    A file counts with the files of its folder, of the folders in it, and of the parts of the engine that compute the
    experiment, whose classes and functions it imports. Installed libraries do not count.
    """
    names: set[str] = set()
    for target in targets:
        name = locate("_target_", target).__module__
        names |= _with_imports(name, name.rpartition(".")[0], set())
    return hashlib.sha256("".join(f"{name}\n{_code(name)}\n" for name in sorted(names)).encode()).hexdigest()


def _with_imports(name: str, package: str, found: set[str]) -> set[str]:
    """Return `found` with a module and the modules of the package from which it imports, directly or not."""
    module = sys.modules[name]
    file = getattr(module, "__file__", None) or ""
    if name not in found and file.endswith(".py") and not file.startswith(_LIBRARIES):
        found.add(name)
        origins = {str(getattr(value, "__module__", None)) for value in vars(module).values()}
        for origin in origins & sys.modules.keys():
            if origin.startswith((f"{package}.", *_ENGINE)):
                _with_imports(origin, package, found)
    return found


@cache
def _code(name: str) -> str:
    tree = ast.parse(Path(str(sys.modules[name].__file__)).read_text())
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
