"""The classes that a configuration names by `_target_`: their options are checked first, then objects are built."""

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import NoneType, UnionType
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from onecurve.errors import UserError, suggest

_OWN = ("onecurve.", "src.", "lightning.pytorch.trainer.")  # whose options a class of a project has
_KINDS = {bool: "true or false", int: "an integer", float: "a number"}
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NOT_PASSED = "single_process"  # only the launcher reads this option of a strategy


def build(node: DictConfig, **changes: Any) -> Any:
    """Build the object that a configuration node describes; it receives plain lists and dictionaries.

    A strategy is built without the option that only the launcher reads.

    Raises:
        UserError: if the constructor raised it, which Hydra's own exception would hide, or needs a package that is not
            installed.
    """
    from hydra.errors import InstantiationException  # late, because a script needs no Hydra
    from hydra.utils import instantiate

    if _NOT_PASSED in node:
        node = OmegaConf.masked_copy(node, [str(key) for key in node if key != _NOT_PASSED])
    try:
        return instantiate(node, _convert_="all", **changes)
    except InstantiationException as error:
        from lightning.pytorch.utilities.exceptions import MisconfigurationException  # late, because it takes seconds

        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, MisconfigurationException):
            raise UserError(f"{node._target_}: {' '.join(str(cause).split())}") from error
        if isinstance(cause, ModuleNotFoundError) and not cause.name:
            # No import failed: a class of Lightning found that an optional package is missing.
            raise UserError(f"{node._target_}: {cause}") from error
        raise


def plain_config(node: Any) -> Any:
    """Return the lists and dictionaries of Python for those of Hydra; interpolations that nothing resolves stay."""
    try:
        return OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException:  # such as `${hydra:...}` in a process that Hydra has not started
        return OmegaConf.to_container(node)


def check_options(cfg: DictConfig) -> None:
    """Check that the classes of a resolved configuration exist, take the options and lack none, before any is built."""
    nodes = dict(target_nodes(OmegaConf.to_container(cfg, resolve=True)))
    # `module.net` is a copy of `model`, whose options the user has set: short names come first.
    unbuilt = tuple(f"{name}." for name, node in nodes.items() if node.get("_recursive_") is False)
    for name in sorted(nodes, key=lambda name: name.count(".")):
        node = nodes[name]
        parameters = parameters_of(locate(f"{name}._target_", node["_target_"]))
        for key in _refused_options(node, parameters):
            hint = f"{suggest(key, parameters)} (~{name}.{key} leaves it out)"
            raise UserError(f"{name}.{key}: {node['_target_']} has no option `{key}`; {hint}")
        for key in [key for key in node if key in parameters]:
            check_value(f"{name}.{key}", node[key], parameters[key].annotation)
        if node.get("_partial_") or "_args_" in node or name.startswith(unbuilt):  # the user's code builds the last
            continue
        named = [key for key, parameter in parameters.items() if parameter.kind in _NAMED]
        missing = [key for key in named if parameters[key].default is inspect.Parameter.empty and key not in node]
        if missing:
            raise UserError(
                f"{name}.{missing[0]} is missing, and {node['_target_']} has no default for it: add it to the file of "
                "conf/ that names the class, or `_partial_: true` if code gives it later"
            )


def _refused_options(node: Any, parameters: dict[str, inspect.Parameter]) -> list[str]:
    """Return the options of a node that its class, which has these parameters, does not take."""
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [key for key in node if not key.startswith("_") and key != _NOT_PASSED and key not in parameters]


def drop_replaced_options(cfg: DictConfig, overrides: Iterable[str]) -> None:
    """Remove the options that a class named by an override `NODE._target_=...` does not take.

    They come from the YAML of the class before it. Options on the command line stay, and are refused later.
    """
    given = [override.lstrip("+~").partition("=")[0] for override in overrides]
    for name in [option.removesuffix("._target_") for option in given if option.endswith("._target_")]:
        node = OmegaConf.select(cfg, name)
        if node and "_target_" in node:
            parameters = parameters_of(locate(f"{name}._target_", node["_target_"]))
            with open_dict(node):
                for key in _refused_options(node, parameters):
                    if f"{name}.{key}" not in given:
                        del node[key]


def check_value(option: str, value: Any, hint: Any) -> None:
    """Check that a flag, a number or a list of them is none of the others, nor a text: `no` would count as true."""
    from torch import Tensor  # late, because `train.py --help` imports this file

    inner = [kind for kind in typing.get_args(hint) if kind is not NoneType]
    if len(inner) == 1 and typing.get_origin(hint) in (typing.Union, UnionType):  # an optional list is a list
        hint = inner[0]
    kinds = [kind for kind in typing.get_args(hint) or [hint] if kind not in (NoneType, Tensor, ...)]
    if not kinds or not all(kind in list(_KINDS) for kind in kinds):
        return
    is_single = typing.get_origin(hint) in (None, typing.Union, UnionType)  # no list of flags or numbers
    is_wrong_number = isinstance(value, float) and float not in kinds
    has_text = isinstance(value, str) or (isinstance(value, list) and any(isinstance(one, str) for one in value))
    is_wrong_shape = isinstance(value, list | dict) or is_wrong_number if is_single else isinstance(value, int | float)
    if has_text or is_wrong_shape:
        kind = " or ".join(_KINDS[kind] for kind in kinds)
        raise UserError(f"{option}={value}: give {kind if is_single else f'a list, each {kind}'}")


def target_nodes(node: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the dotted name and the content of each node from which Hydra would build an object."""
    if isinstance(node, dict) and "_target_" in node:
        yield name, node
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from target_nodes(child, f"{name}.{key}".strip("."))


def locate(option: str, target: str) -> Callable[..., Any]:
    """Import the class or function `target`, which the configuration gives as `option`."""
    parts = str(target).split(".")
    if not all(part.isidentifier() for part in parts):
        raise UserError(f"{option}={target}: give a class or a function, as MODULE.NAME")
    names: list[str] = []  # those that are left behind the module
    found: Any = None
    while not found:
        module = ".".join(parts)
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            is_no_module = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
            if not is_no_module or len(parts) == 1:
                raise UserError(f"{option}={target}: {' '.join(str(error).split())}") from error
            names.insert(0, parts.pop())
    for name in names:
        if not hasattr(found, name):
            raise UserError(f"{option}={target}: {found.__name__} has no {name}; {suggest(name, _names_in(found))}")
        found = getattr(found, name)
    if not callable(found):
        raise UserError(f"{option}={target}: {target} is a {type(found).__name__}; give a class or a function")
    return found


def _names_in(found: Any) -> list[str]:
    """Return the classes and functions of a module or class, and the modules of a package."""
    origins = {name: str(getattr(value, "__module__", "")) for name, value in vars(found).items() if name[0] != "_"}
    module = getattr(found, "__module__", found.__name__)
    of_package = [part.name for part in pkgutil.iter_modules(vars(found).get("__path__", ()))]
    return [*of_package, *(name for name, origin in origins.items() if origin.startswith(module))]


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
    parts = [part for part in getattr(found, "__mro__", ())[1:] if part.__module__.startswith(_OWN)]
    options: dict[str, Any] = {}
    for part in [*reversed(parts), found]:
        for parameter in parameters_of(part).values():
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                default = None if parameter.default is parameter.empty else parameter.default
                options[parameter.name] = list(default) if isinstance(default, tuple) else default
    return options
