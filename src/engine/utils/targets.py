"""The class or function that a `_target_` names, and its options."""

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from hydra._internal.utils import _locate

from src.engine.utils.errors import UserError


def locate(option: str, target: str) -> Callable[..., Any]:
    """Import the class or function `target`, which the configuration gives as `option`."""
    try:
        found = _locate(target)
    except (ImportError, ValueError) as error:  # the second for a name with a dot too many
        if isinstance(error, ImportError) and not isinstance(error.__cause__, ImportError | AttributeError | None):
            raise  # a bug in the file
        raise UserError(f"{option}={target}: {' '.join(str(error).split())}") from error
    if not callable(found):
        raise UserError(f"{option}={target}: {target} is a {type(found).__name__}; give a class or a function")
    return found


def parameters_of(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a class or function; a class written in C without a signature counts as taking any."""
    try:
        return dict(inspect.signature(target).parameters)
    except ValueError:
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}


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
        for parameter in parameters_of(part).values():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                default = None if parameter.default is parameter.empty else parameter.default
                options[parameter.name] = list(default) if isinstance(default, tuple) else default
    return options


def target_nodes(node: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted name and the content of each node from which Hydra would build an object."""
    if isinstance(node, dict) and "_target_" in node:
        yield name, node
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from target_nodes(child, f"{name}.{key}".strip("."))
