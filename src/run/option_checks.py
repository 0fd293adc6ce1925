"""Check the options of a run before anything is built: each name is known and read, and each value has its type."""

import re
import typing
from collections.abc import Collection, Iterable, Iterator, Sequence
from enum import Enum
from importlib.resources import files
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from src.utils.errors import UserError, nearest_options, similar_names
from src.utils.quoting import as_typed
from src.utils.targets import accepted_options, locate

_CONF = Path(__file__).parents[2] / "conf"
_PARTS = ("model", "optimizer", "scheduler")  # the groups from which a module is built
_RECIPES = ("experiment", "preset", "debug")  # the groups whose files set options of other groups
_ROOT_TYPES = {
    "fit": bool,
    "doctor": bool,
    "report": bool,
    "launch.max_restarts": int,
}
NOT_PASSED = ("single_process",)  # the launcher reads this option of a strategy
_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a text", NoneType: "null"}
Tree = dict[str, Any]


def check_root_options(cfg: DictConfig) -> None:
    """Check the types of the options that belong to no class.

    Raises:
        UserError: if one is of another type.
    """
    for name, hint in _ROOT_TYPES.items():
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


def refuse_unused_groups(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Check that the module refers to each group that an override chooses or changes.

    Args:
        cfg: the composed configuration, before interpolations are resolved.
        overrides: the command line.

    Raises:
        UserError: if it does not, such as `model=vit` with `module=gan`.
    """
    module = OmegaConf.to_yaml(cfg.module)  # with interpolations such as ${model} or ${model.width}
    for override in overrides:
        group = re.split(r"[.=]", override.lstrip("+~"))[0]
        if group in _PARTS and not re.search(rf"\${{{group}\b", module):
            raise UserError(f"{override}: {cfg.module._target_} does not use `{group}`; leave the option out")


def refuse_unknown_additions(cfg: DictConfig, hydra_cfg: Any) -> None:
    """Check that each `+NAME=VALUE` belongs to a group, to an object or to an interpolation such as `${base_lr}`.

    The options of the root and of `launch` belong to no class, so nothing else would read or refuse others.

    Args:
        cfg: the composed configuration, before interpolations are resolved.
        hydra_cfg: Hydra's own configuration.

    Raises:
        UserError: if nothing reads it.
    """
    root = yaml.safe_load((_CONF / "train.yaml").read_text())
    groups = {file.name for file in _CONF.iterdir() if file.is_dir()} | {*hydra_cfg.runtime.choices}
    for override in hydra_cfg.overrides.task:
        name = override.lstrip("+").partition("=")[0]
        first, _, key = name.partition(".")
        if not override.startswith("+") or "/" in name or "@" in name or first in groups:
            continue
        is_known = first in root and (first != "launch" or not key or key in root["launch"])
        if not is_known and not is_variable(first, [cfg, hydra_cfg.overrides]):
            tree: Any = OmegaConf.to_container(cfg)
            added = name if first in root else first
            names = {option for option in all_names(tree) if not f"{option}.".startswith(f"{added}.")}
            raise UserError(f"{override}: {name} is no option here; {nearest_options(name, names | groups)}")


def refuse_unknown_keys(cfg: DictConfig, hydra_cfg: Any) -> None:
    """Check that the chosen recipes set only options that exist without them, or that a class accepts.

    A recipe may also have variables of its own: keys at the root that it interpolates, such as `${base_lr}`.

    Args:
        cfg: the composed configuration.
        hydra_cfg: Hydra's own configuration.

    Raises:
        UserError: if a key is unknown.
    """
    choices = hydra_cfg.runtime.choices  # without the groups for which a list is chosen
    if not any(choices.get(group, "a list") for group in _RECIPES):
        return  # the check takes almost as long as the composition
    known, recipes = _load_files(hydra_cfg)
    for file, tree in recipes.items():
        for parent, key, value in _new_keys(tree, known):
            is_object = isinstance(value, dict) and "_target_" in value
            if not (key.startswith("_") or is_object or (not parent and is_variable(key, tree))):
                _check_accepted(cfg, parent, key, file, known)
        _merge(known, tree)


def _load_files(hydra_cfg: Any) -> tuple[Tree, dict[Any, Tree]]:
    """Return the configuration without recipes, and the content of each recipe by its path.

    Raises:
        UserError: if a recipe lacks its first line.
    """
    known: Tree = {}
    recipes = {}
    for group, file, package in _chosen_files(hydra_cfg):
        if package == group in _RECIPES:
            raise UserError(f"{file}: begin it with the line `# @package _global_`; its keys have no effect without it")
        if group in _RECIPES:
            recipes[file] = _load(file, package)
        else:
            _merge(known, _load(file, package))
    return known, recipes


def _chosen_files(hydra_cfg: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield group, path and package of each file of the configuration, in the order of composition."""
    overrides = [*hydra_cfg.overrides.hydra, *hydra_cfg.overrides.task]
    loader = GlobalHydra.instance().config_loader()
    chosen = loader.compute_defaults_list(hydra_cfg.job.config_name, overrides, RunMode.RUN).defaults
    folders = [
        Path(source.path) if source.schema == "file" else files(source.path)
        for source in hydra_cfg.runtime.config_sources
        if source.schema == "file" or (source.schema == "pkg" and find_spec(source.path))
    ]
    for default in chosen:
        group = f"{default.config_path}".partition("/")[0]
        paths = [folder / f"{default.config_path}.yaml" for folder in folders]
        if group != "hydra" and (file := next((path for path in paths if path.is_file()), None)):
            yield group, file, default.package


def _load(file: Any, package: str) -> Tree:
    """Return the content of a file as it is merged into the root, without its defaults list and Hydra's node."""
    tree: Tree = yaml.safe_load(file.read_text()) or {}
    tree.pop("defaults", None)
    for name in reversed(package.split(".") if package else []):
        tree = {name: tree}
    tree.pop("hydra", None)
    return tree


def _merge(known: Tree, tree: Tree) -> None:
    for key, value in tree.items():
        if isinstance(value, dict) and isinstance(known.get(key), dict):
            _merge(known[key], value)
        else:
            known[key] = value


def _new_keys(tree: Tree, known: Tree, parent: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the parent's name, the key and the value of each key of `tree` that `known` lacks."""
    for key, value in tree.items():
        if key not in known:
            yield parent, str(key), value
        elif isinstance(value, dict) and isinstance(known[key], dict):
            yield from _new_keys(value, known[key], f"{parent}.{key}".strip("."))


def is_variable(key: str, tree: Any) -> bool:
    """Return whether a value in the tree interpolates the key `key` of the root."""
    return re.search(rf"\$\{{[^}}]*(?<!\w){re.escape(key)}\b", str(tree)) is not None


def _check_accepted(cfg: DictConfig, parent: str, key: str, file: Any, known: Tree) -> None:
    """Check that a new key belongs to an object whose class accepts it.

    Raises:
        UserError: if not.
    """
    options, name = all_names(known), f"{parent}.{key}".strip(".")
    if target := OmegaConf.select(cfg, f"{parent}._target_"):
        accepted = accepted_options(locate(f"{parent}._target_", target))
        if accepted is None or key in accepted:
            return
        options |= {f"{parent}.{option}" for option in accepted}
    elif _is_inside_object(cfg, parent):
        return  # a mapping that is the value of an option
    hint = "nest the keys, one per line" if name in options else nearest_options(name, options)
    raise UserError(f"{file}: {name} is no option here; {hint}")


def _is_inside_object(cfg: DictConfig, name: str) -> bool:
    parents = name.split(".")
    names = [".".join(parents[:length]) for length in range(1, len(parents) + 1)]
    return any(OmegaConf.select(cfg, f"{name}._target_") for name in names)


def all_names(tree: Tree, prefix: str = "") -> set[str]:
    """Return the dotted names of all nodes and options."""
    names = {f"{prefix}{key}" for key in tree if not str(key).startswith("_")}
    for key, value in tree.items():
        if isinstance(value, dict):
            names |= all_names(value, f"{prefix}{key}.")
    return names
