"""The class or function that a `_target_` names, and the options that it accepts."""

import importlib
import inspect
from collections.abc import Callable
from functools import cache, reduce
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


@cache
def default_options(target: str) -> dict[str, Any]:
    """Return the options of a class or function, with their defaults; None stands for an option without a default.

    The options that a class of this project hands on to its base classes belong to it. A default that is a
    tuple is returned as a list, as in a configuration.
    """
    found = locate("_target_", target)
    parts = [part for part in getattr(found, "__mro__", ())[1:] if part.__module__.startswith("src.")]
    options: dict[str, Any] = {}
    for part in [*reversed(parts), found]:
        try:
            parameters = inspect.signature(part).parameters.values()
        except ValueError:  # some classes written in C have no signature
            continue
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                default = None if parameter.default is parameter.empty else parameter.default
                options[parameter.name] = list(default) if isinstance(default, tuple) else default
    return options


def target_names(node: Any) -> list[str]:
    """Return the paths of all that Hydra would call to build a configuration node."""
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else []
    own = [str(node["_target_"])] if isinstance(node, dict) and "_target_" in node else []
    return own + [target for child in children for target in target_names(child)]
