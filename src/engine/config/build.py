"""Build the objects that a configuration describes, and check first that their classes accept the options."""

import re
import sys
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from src.engine.utils.errors import UserError, similar_names
from src.engine.utils.overrides import as_typed
from src.engine.utils.targets import accepted_options, locate, required_options, target_nodes

_NUMBERS = {bool: "true or false", int: "an integer", float: "a number"}
_PARTS = {"model": "net", "optimizer": "optimizer", "scheduler": "schedule"}  # groups, and options of the module
_OBJECTS = (*_PARTS, "data", "module", "strategy", "trainer")
NOT_PASSED = "single_process"  # only the launcher reads this option of a strategy


def build(node: DictConfig, **changes: Any) -> Any:
    """Build the object that a configuration node describes; it receives plain lists and dictionaries.

    Raises:
        UserError: if the constructor raised it, which Hydra's own exception would hide, does not take an option, or
            needs a package that is not installed.
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
        # A function that takes any option, such as those of torchvision, may call another one that does not.
        unexpected = re.search(r"got an unexpected keyword argument '(\w+)'", str(cause))
        if unexpected and re.search(rf"\b{unexpected[1]}:", OmegaConf.to_yaml(node)):
            raise UserError(f"{' '.join(str(error).split())}: leave `{unexpected[1]}` out") from error
        raise


def check_targets(cfg: DictConfig) -> None:
    """Check that each group from which an object is built names a class or function.

    A recipe sets `model`, `optimizer` or `scheduler` to null if its module has such a part of its own.
    """
    for name in _OBJECTS:
        is_left_out = name in _PARTS and cfg.get(name) is None and _PARTS[name] not in (cfg.module or {})
        if not is_left_out and not OmegaConf.select(cfg, f"{name}._target_"):
            raise UserError(f"{name} has no `_target_`: let its file in conf/{name} name a class or function")


def check_options(cfg: DictConfig) -> None:
    """Check that each class of a resolved configuration exists, and that the options are those that it takes."""
    nodes = target_nodes(OmegaConf.to_container(cfg, resolve=True))
    # `module.net` is a copy of `model`, whose options the user has set: short names come first.
    for name, node in sorted(nodes, key=lambda item: item[0].count(".")):
        target = locate(f"{name}._target_", node["_target_"])
        accepted, hints = accepted_options(target), _type_hints(target)
        for key in _options(node):
            if accepted is not None and key not in accepted:
                names = similar_names(key, accepted)
                hint = f"did you mean {' or '.join(names)}?" if names else "choose a class that has it"
                option = f"{name}.{key}={as_typed(node[key])}"
                raise UserError(f"{option}: {node['_target_']} has no option `{key}`; leave it out, or {hint}")
            check_numbers(f"{name}.{key}", node[key], hints.get(key))
        is_incomplete = "_args_" in node or node.get("_partial_")  # more arguments come by position, or with the call
        if missing := set() if is_incomplete else required_options(target) - node.keys():
            raise UserError(f"{name}: {node['_target_']} needs `{min(missing)}`: set {name}.{min(missing)}")


def _options(node: Any) -> list[str]:
    """Return the options of a node that its class gets."""
    return [str(key) for key in node if not str(key).startswith("_") and key != NOT_PASSED]


def _type_hints(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]
    except (AttributeError, NameError, TypeError):  # such as names that only type checkers import
        return {}


def check_numbers(option: str, value: Any, hint: Any) -> None:
    """Check the value of an option whose type is a number, a flag or a list of them; others have any value."""
    if value is None or isinstance(value, dict):
        return
    is_union = typing.get_origin(hint) in (typing.Union, UnionType)
    kinds = {kind for kind in (typing.get_args(hint) if is_union else [hint]) if kind is not NoneType}
    if len(kinds) == 1 and typing.get_origin(*kinds) in (list, tuple, Sequence):
        _check_elements(option, value, {kind for kind in typing.get_args(*kinds) if kind is not ...})
        return
    numbers = [kind for kind in _NUMBERS if kind in kinds]
    if not numbers or not kinds <= {*_NUMBERS, Tensor}:  # a text fits as well
        return
    if not isinstance(value, int | float if float in numbers else int):
        raise UserError(f"{option}={as_typed(value)}: give {' or '.join(_NUMBERS[kind] for kind in numbers)}")


def _check_elements(option: str, value: Any, kinds: set[Any]) -> None:
    if not isinstance(value, list):
        raise UserError(f"{option}={as_typed(value)}: give a list")
    if len(kinds) == 1:  # the elements of a tuple may have types of their own
        for element in value:
            check_numbers(option, element, *kinds)


def drop_replaced_options(cfg: DictConfig, overrides: Iterable[str]) -> None:
    """Remove the options that a class named by an override `NODE._target_=...` does not accept, and say so.

    They come from the YAML of the class before it. Options on the command line stay, and are refused later.

    Args:
        cfg: the composed configuration, before interpolations are resolved; it is changed.
        overrides: the command line.
    """
    given = [override.lstrip("+~").partition("=")[0] for override in overrides]
    for name in [option.removesuffix("._target_") for option in given if option.endswith("._target_")]:
        node = OmegaConf.select(cfg, name)
        accepted = accepted_options(locate(f"{name}._target_", node._target_)) if node and "_target_" in node else None
        if accepted is None:
            continue
        dropped = [key for key in _options(node) if key not in accepted and f"{name}.{key}" not in given]
        with open_dict(node):
            for key in dropped:
                del node[key]
        if dropped:
            what = f"{node._target_} has no {', '.join(dropped)}, which conf/{name} sets"
            print(f"{name}: {what}: left out", file=sys.stderr)


def drop_unused_options(cfg: DictConfig, overrides: Iterable[str], conf: Path) -> None:
    """Remove the options of loggers and default callbacks that the run leaves out; a recipe may have set them.

    Args:
        cfg: the composed configuration; it is changed.
        overrides: the command line, whose options stay, and are refused later.
        conf: the folder of the configuration.
    """
    names = {
        "logger": [file.stem for file in (conf / "logger").glob("*.yaml")],
        "callbacks": list(OmegaConf.load(conf / "callbacks" / "none.yaml")),
    }
    for name in (f"{group}.{part}" for group in names for part in names[group]):
        node = OmegaConf.select(cfg, name)
        if node and "_target_" not in node and not any(word.lstrip("+~").startswith(name) for word in overrides):
            OmegaConf.update(cfg, name, None)
