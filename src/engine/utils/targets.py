"""The class or function that a `_target_` names, and the options that it accepts."""

import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from hydra._internal.utils import _locate

from src.engine.utils.errors import UserError, similar_names

# Classes, functions and modules of the project that had another path in earlier versions: {old path: new path}. Runs
# that are continued, and checkpoints that are loaded, may still name the old one.
MOVED = {
    "src.callbacks": "src.engine.run",
    "src.callbacks.evaluation": "src.engine.observe.evaluation",
    "src.callbacks.gradients": "src.engine.observe.gradients",
    "src.callbacks.progress": "src.engine.observe.progress",
    "src.callbacks.throughput": "src.engine.observe.throughput",
    "src.callbacks.timeline": "src.engine.observe.timeline",
    "src.callbacks.frechet": "src.models.gan_frechet",
    "src.callbacks.samples": "src.models.gan_samples",
    "src.callbacks.whitening": "src.models.whitening",
    "src.engine.optim.schedulers": "src.engine.optim.schedules",
    "src.loggers": "src.engine.observe",
    "src.optim": "src.engine.optim",
    "src.strategies": "src.engine.parallel",
    "src.strategies.auto": "src.engine.parallel.ddp",
    "src.sweeps": "src.engine.sweeps",
}


def with_moved_targets(saved: Any) -> Any:
    """Return saved text or values with today's path of each class that has moved.

    Args:
        saved: the text of a saved configuration, an override, or a list or dictionary of values.
    """
    if isinstance(saved, dict):
        return {name: with_moved_targets(value) for name, value in saved.items()}
    if isinstance(saved, list):
        return [with_moved_targets(value) for value in saved]
    if not isinstance(saved, str) or not MOVED:
        return saved
    longest_first = sorted(map(re.escape, MOVED), key=len, reverse=True)
    return re.sub(rf"(?<![\w.])({'|'.join(longest_first)})(?!\w)", lambda found: MOVED[found[0]], saved)


def locate(option: str, target: str) -> Callable[..., Any]:
    """Import the class or function `target`, which the configuration gives as `option`.

    Raises:
        UserError: if there is none, or its package is not installed, or `target` names something else.
    """
    try:
        found = _locate(target)
    except (ImportError, ValueError) as error:  # the second for a name with a dot too many
        if isinstance(error, ImportError) and not isinstance(error.__cause__, ImportError | AttributeError | None):
            raise  # a bug in the file
        raise UserError(f"{option}={target}: {' '.join(str(error).split())}{_nearest(target)}") from error
    if not callable(found):
        raise UserError(f"{option}={target}: {target} is a {type(found).__name__}; give a class or a function")
    return found


def _nearest(target: str) -> str:
    """Return the end of an error message: names like the first unknown one of a dotted path, if there are any."""
    parent, _, name = target.rpartition(".")
    while parent and parent not in sys.modules:
        parent, _, name = parent.rpartition(".")
    module = sys.modules.get(parent)
    known = {*dir(module), *(file.name for file in pkgutil.iter_modules(getattr(module, "__path__", [])))}
    if not module or not name or name in known:  # a part that exists has an error of its own
        return ""
    names = [f"{parent}.{similar}" for similar in similar_names(name, known)]
    return f" Did you mean {' or '.join(names)}?" if names else ""


def _parameters(target: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a class or function; a class written in C without a signature counts as taking any."""
    try:
        return list(inspect.signature(target).parameters.values())
    except ValueError:
        return [inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)]


def accepted_options(target: Callable[..., Any]) -> set[str] | None:
    """Return the names of the options that a class or function accepts, or None if it accepts any."""
    parameters = _parameters(target)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in by_name}


def required_options(target: Callable[..., Any]) -> set[str]:
    """Return the names of the options without which a class or function cannot be called."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {one.name for one in _parameters(target) if one.default is one.empty and one.kind not in variable}


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
        for parameter in _parameters(part):
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
