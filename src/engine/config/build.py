"""Build the objects that a configuration describes, and check first that their classes accept the options."""

import typing
from types import NoneType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
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
    for group in ("data", "module", "strategy", "trainer"):
        if group not in nodes:
            raise UserError(f"{group} has no `_target_`: let its file in conf/{group} name a class or function")
    # `module.net` is a copy of `model`, whose options the user has set: short names come first.
    for name in sorted(nodes, key=lambda name: name.count(".")):
        _check_node(name, nodes[name])


def _check_node(name: str, node: dict[str, Any]) -> None:
    parameters = parameters_of(locate(f"{name}._target_", node["_target_"]))
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in [key for key in node if not key.startswith("_") and key != NOT_PASSED]:
        if key in parameters:
            check_value(f"{name}.{key}", node[key], parameters[key].annotation)
        elif not takes_any:
            hint = f"{suggest(key, parameters)} (~{name}.{key} leaves it out)"
            raise UserError(f"{name}.{key}: {node['_target_']} has no option `{key}`; {hint}")


def check_value(option: str, value: Any, hint: Any) -> None:
    """Check that the value is no text where flags or numbers are declared: `no` would count as true."""
    kinds = [kind for kind in typing.get_args(hint) or [hint] if kind not in (NoneType, Tensor, ...)]
    if isinstance(value, str) and kinds and all(kind in list(_KINDS) for kind in kinds):
        raise UserError(f"{option}={value}: give {' or '.join(_KINDS[kind] for kind in kinds)}")
