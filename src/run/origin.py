"""The origin of a run: its command, the revision of its source, and the options that differ from conf/'s defaults."""

import json
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from src.utils.flatten import flatten_config

_COMMAND = "TRAIN_COMMAND"  # environment variable, which also reaches the jobs of a sweep in other processes
_PROJECT = Path(__file__).parents[2]
_GIT_TIMEOUT = 5.0  # seconds
# These options are no part of the experiment.
_NOT_COMPARED = ("run_dir", "ckpt_path", "resume", "report", "runtime.", "logger.", "data.root")


def keep_command(argv: Sequence[str]) -> None:
    """Keep the command as the user has typed it, before shorthands replace words of it."""
    os.environ[_COMMAND] = json.dumps(["python", *argv])


def typed_command(overrides: Sequence[str]) -> list[str]:
    """Return the command as typed; for a run that no command started, one with the same overrides."""
    if _COMMAND in os.environ:
        return list(json.loads(os.environ[_COMMAND]))
    return ["python", "train.py", *overrides]


def source_revision() -> tuple[str | None, bool]:
    """Return the commit of the source, None if there is none, and whether files differ from it; False outside of git.

    Git would refresh its index, whose lock could fail a command of the user.
    """
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch"]
    try:
        status = subprocess.run(command, cwd=_PROJECT, capture_output=True, text=True, timeout=_GIT_TIMEOUT, check=True)
    except (OSError, subprocess.SubprocessError):
        return None, False
    head, *lines = status.stdout.splitlines()  # "# branch.oid COMMIT", then "# branch..." and changed files
    commit = head.rpartition(" ")[2]
    return None if commit == "(initial)" else commit, any(not line.startswith("#") for line in lines)


def changed_options(cfg: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Return the names of the options that differ from the defaults of conf/, before interpolations are resolved.

    An option that only follows from a changed one is not listed.
    """
    if not overrides:
        return []
    given, default = _flatten(cfg), _flatten(_defaults())
    names = sorted(given.keys() | default.keys())
    return [name for name in names if given.get(name) != default.get(name) and not name.startswith(_NOT_COMPARED)]


def default_and_value(cfg: DictConfig, names: Sequence[str]) -> list[list[Any]]:
    """Return [option, default, value] of each option whose values differ, with None where there is no such option."""
    rows = [[name, _select(_defaults(), name), _select(cfg, name)] for name in names]
    return [row for row in rows if row[1] != row[2]]


def describe_setup(cfg: DictConfig, choices: Any, world_size: int) -> dict[str, Any]:
    """Return model, strategy and world size by name, and the tags that they add to those of the user.

    Args:
        cfg: the composed configuration, with a list of tags.
        choices: the chosen file of each group.
        world_size: the number of ranks.
    """
    model = choices.get("model") if "net" in cfg.module else choices.get("module")  # a GAN has networks of its own
    resolved = {"auto": "ddp" if world_size > 1 else "single"}
    strategy = resolved.get(choices.strategy, choices.strategy)
    tags = list(dict.fromkeys([*cfg.tags, strategy, f"x{world_size}", *([model] if model else [])]))
    return {"model": model, "strategy": strategy, "world_size": world_size, "tags": tags}


def _defaults() -> DictConfig:
    return _compose_defaults(max(file.stat().st_mtime_ns for file in (_PROJECT / "conf").rglob("*.yaml")))


@cache
def _compose_defaults(newest_change: int) -> DictConfig:
    """Compose conf/ without overrides, which takes a tenth of a second; a sweep does so once.

    Args:
        newest_change: modification time of the newest file, by which a notebook notices an edited one.
    """
    return hydra.compose("train")


def _flatten(cfg: DictConfig) -> dict[str, Any]:
    return flatten_config(OmegaConf.to_container(cfg))


def _select(cfg: DictConfig, name: str) -> Any:
    try:
        value = OmegaConf.select(cfg, name)
    except OmegaConfBaseException:  # it interpolates an option that this configuration lacks
        return None
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
