"""Check options by the signature and the type hints of their class, before anything is built."""

import typing
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from os import PathLike
from types import NoneType, UnionType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from src.utils.errors import UserError, similar_names
from src.utils.quoting import as_typed
from src.utils.targets import accepted_options, locate

_ROOT = {"fit": bool, "doctor": bool, "report": bool, "launch.max_restarts": int, "launch.rendezvous_timeout": float}
NOT_PASSED = ("single_process",)  # the launcher reads this option of a strategy
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", NoneType: "null"}


def check_root_options(cfg: DictConfig) -> None:
    """Check the types of the options that belong to no class.

    Raises:
        UserError: if one is of another type.
    """
    for name, hint in _ROOT.items():
        _check_type(name, OmegaConf.select(cfg, name), hint)


def check_target_options(cfg: DictConfig) -> None:
    """Check that each class of a resolved configuration exists and accepts its options.

    Raises:
        UserError: if a class does not exist or lacks an option, or an option is of another type.
    """
    nodes = _target_nodes(OmegaConf.to_container(cfg, resolve=True))
    # `module.net` is a copy of `model`, whose options the user has set: short names come first.
    for name, node in sorted(nodes, key=lambda item: item[0].count(".")):
        target = locate(f"{name}._target_", node["_target_"])
        accepted, hints = accepted_options(target), _type_hints(target)
        for key, value in node.items():
            if not key.startswith("_") and key not in NOT_PASSED:
                _check_name(f"{name}.{key}={as_typed(value)}", node["_target_"], key, accepted)
                _check_type(f"{name}.{key}", value, hints.get(key, Any))


def _target_nodes(node: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and content of each node that describes an object."""
    if isinstance(node, dict) and "_target_" in node:
        yield name, node
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from _target_nodes(child, f"{name}.{key}".strip("."))


def _type_hints(target: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(target.__init__ if isinstance(target, type) else target)  # type: ignore[misc]
    except (AttributeError, NameError, TypeError):  # such as names that only type checkers import
        return {}


def _check_name(word: str, target: str, key: str, accepted: set[str] | None) -> None:
    if accepted is None or key in accepted:
        return
    names = similar_names(key, accepted)
    hint = f"did you mean {' or '.join(names)}?" if names else "choose a class that has it"
    raise UserError(f"{word}: {target} has no option `{key}`; leave it out, or {hint}")


def _check_type(name: str, value: Any, hint: Any) -> None:
    """Check a value against the hint, if that includes numbers or lists: other types can have any value."""
    members = _members(hint)
    if not any(member in (int, float, bool) or _is_list(member) for member in members):
        return
    if value is not None and not any(_fits(value, member) for member in members):
        words = dict.fromkeys(_describe(member) for member in members if member is not int or float not in members)
        raise UserError(f"{name}={as_typed(value)}: give {' or '.join(word for word in words if word)}")


def _members(hint: Any) -> list[Any]:
    """Return the types of a union, or the type itself."""
    if typing.get_origin(hint) in (typing.Union, UnionType):
        return [member for argument in typing.get_args(hint) for member in _members(argument)]
    return [hint]


def _is_list(member: Any) -> bool:
    return (typing.get_origin(member) or member) in (list, tuple, Collection, Iterable, Sequence)


def _fits(value: Any, member: Any) -> bool:
    """Return whether the value may be of that type; unknown types fit."""
    if member is bool:
        return isinstance(value, int)
    if member is float:
        return isinstance(value, int | float)
    if typing.get_origin(member) is typing.Literal:
        return value in typing.get_args(member)
    if isinstance(value, dict):
        return True
    if _is_list(member):
        return isinstance(value, list) and _elements_fit(value, typing.get_args(member))
    if isinstance(member, type) and not issubclass(member, (str, PathLike, Enum)) and member is not object:
        return isinstance(value, member)
    return not isinstance(value, list)


def _elements_fit(values: list[Any], hints: tuple[Any, ...]) -> bool:
    if not hints or (len(hints) > 1 and hints[1] is not ...):  # a tuple of several types
        return True
    return all(any(_fits(value, member) for member in _members(hints[0])) for value in values)


def _describe(member: Any) -> str | None:
    if _is_list(member):
        elements = [_WORDS.get(element) for hint in typing.get_args(member)[:1] for element in _members(hint)]
        return f"a list, each element {elements[0]}" if elements and elements[0] else "a list"
    if typing.get_origin(member) is typing.Literal:
        return " or ".join(map(str, typing.get_args(member)))
    return _WORDS.get(member)
