"""Build the objects that a configuration describes, and check first that their classes accept the options."""

import typing
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from src.engine.utils.errors import UserError, suggest
from src.engine.utils.targets import locate, parameters_of, target_nodes

_KINDS = {bool: "true or false", int: "an integer", float: "a number"}
NOT_PASSED = "single_process"  # only the launcher reads this option of a strategy


def build(node: DictConfig, **changes: Any) -> Any:
    """Build the object that a configuration node describes; it receives plain lists and dictionaries.

    Raises:
        UserError: if the constructor raised it, which Hydra's own exception would hide, or needs a package that is not
            installed.
    """
    try:
        return instantiate(node, _convert_="all", **changes)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if isinstance(cause, ModuleNotFoundError) and not cause.name:
            # No import failed: a class of Lightning found that an optional package is missing.
            raise UserError(f"{node._target_}: {cause}") from error
        raise


def check_options(cfg: DictConfig) -> None:
    """Check that the classes of a resolved configuration exist and take the options, before anything is built."""
    nodes = dict(target_nodes(OmegaConf.to_container(cfg, resolve=True)))
    # `module.net` is a copy of `model`, whose options the user has set: short names come first.
    for name in sorted(nodes, key=lambda name: name.count(".")):
        _check_node(name, nodes[name])


def _check_node(name: str, node: dict[str, Any]) -> None:
    parameters = parameters_of(locate(f"{name}._target_", node["_target_"]))
    for key in _refused_options(name, node):
        hint = f"{suggest(key, parameters)} (~{name}.{key} leaves it out)"
        raise UserError(f"{name}.{key}: {node['_target_']} has no option `{key}`; {hint}")
    for key in [key for key in node if key in parameters]:
        check_value(f"{name}.{key}", node[key], parameters[key].annotation)


def _refused_options(name: str, node: Any) -> list[str]:
    """Return the options of a node that its class does not take."""
    parameters = parameters_of(locate(f"{name}._target_", node["_target_"]))
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [key for key in node if not key.startswith("_") and key != NOT_PASSED and key not in parameters]


def drop_replaced_options(cfg: DictConfig, overrides: Iterable[str]) -> None:
    """Remove the options that a class named by an override `NODE._target_=...` does not take.

    They come from the YAML of the class before it. Options on the command line stay, and are refused later.
    """
    given = [override.lstrip("+~").partition("=")[0] for override in overrides]
    for name in [option.removesuffix("._target_") for option in given if option.endswith("._target_")]:
        node = OmegaConf.select(cfg, name)
        if node and "_target_" in node:
            with open_dict(node):
                for key in _refused_options(name, node):
                    if f"{name}.{key}" not in given:
                        del node[key]


def check_value(option: str, value: Any, hint: Any) -> None:
    """Check that the value is no text or list where flags or numbers are declared: `no` would count as true."""
    kinds = [kind for kind in typing.get_args(hint) or [hint] if kind not in (NoneType, Tensor, ...)]
    if not kinds or not all(kind in list(_KINDS) for kind in kinds):
        return
    is_single = typing.get_origin(hint) in (None, typing.Union, UnionType)  # no list of flags or numbers
    is_wrong_number = isinstance(value, float) and float not in kinds
    if isinstance(value, str) or (is_single and (isinstance(value, list | dict) or is_wrong_number)):
        raise UserError(f"{option}={value}: give {' or '.join(_KINDS[kind] for kind in kinds)}")
