"""Refuse unknown keys in the files of `experiment`, `preset` and `debug`, which Hydra adds without a check."""

import re
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from src.utils.errors import UserError, nearest_options
from src.utils.targets import accepted_options, locate

_RECIPES = ("experiment", "preset", "debug")  # the groups whose files set options of other groups
Tree = dict[str, Any]


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
