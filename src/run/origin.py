"""The origin of a run: its command, the revision of its source, and its model and strategy by name."""

import subprocess
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

# The environment variable of the command as typed, a list in JSON; it reaches the jobs of a sweep in other processes.
COMMAND = "TRAIN_COMMAND"
_PROJECT = Path(__file__).parents[2]
_GIT_TIMEOUT = 5.0  # seconds


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
