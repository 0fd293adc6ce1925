"""The class or function that a `_target_` names, and the options that it accepts."""

import importlib
import inspect
from collections.abc import Callable
from functools import reduce
from types import ModuleType
from typing import Any

from src.utils.errors import UserError, suggest


def locate(option: str, target: str) -> Callable[..., Any]:
    """Import the class or function `target`, which the configuration gives as `option`.

    Raises:
        UserError: if there is none, or its package is not installed, or `target` names something else.
    """
    module: Any = _import_module(f"{option}={target}", target)
    names = target.removeprefix(module.__name__).split(".")[1:]
    try:
        found = reduce(getattr, names, module)
    except AttributeError as error:
        hint = suggest(names[0], [name for name in vars(module) if not name.startswith("_")])
        raise UserError(f"{option}={target}: {module.__name__} has no {'.'.join(names)}; {hint}") from error
    if not callable(found):
        raise UserError(f"{option}={target}: {target} is a {type(found).__name__}; give a class or a function")
    return found


def _import_module(word: str, target: str) -> ModuleType:
    """Import the longest part of the path `target` that is a module."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        path = ".".join(parts[:length])
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if not f"{path}.".startswith(f"{error.name}."):  # an import inside that module
                raise _not_installed(word, f"{error.name}".partition(".")[0]) from error
    raise _not_installed(word, parts[0])


def _not_installed(word: str, package: str) -> UserError:
    hint = f"install it (pip install {package}), or correct the name"
    return UserError(f"{word}: there is no package `{package}`; {hint}")


def accepted_options(target: Callable[..., Any]) -> set[str] | None:
    """Return the names of the options that a class or function accepts, or None if it accepts any."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some classes written in C have no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in by_name}
