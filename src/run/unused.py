"""Refuse overrides that would have no effect: of a group that the module does not use, and of unknown names."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from src.run.recipe_keys import all_names, is_variable
from src.utils.errors import UserError, nearest_options

_CONF = Path(__file__).parents[2] / "conf"

_PARTS = ("model", "optimizer", "scheduler")  # the groups from which a module is built


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
