"""Weights & Biases: online where a key is configured, otherwise offline, with a line that says what to do with it."""

import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from src.loggers.async_logger import AsyncLogger

_log = logging.getLogger(__name__)


def wandb_logger(
    project: str, run_id: str, folder: str, group: str | None = None, tags: list[str] | None = None
) -> AsyncLogger:
    """The logger of one training run, whatever the number of its processes and however often it is resumed.

    wandb takes a second to import and to start, and longer where it waits for its server: training does not.
    """
    options = {"project": project, "name": run_id, "id": run_id, "save_dir": folder, "group": group, "tags": tags}
    return AsyncLogger(partial(_begin, folder, options), version=run_id)


def _begin(folder: str, options: dict[str, Any]) -> Any:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    mode = online_or_offline()
    if mode == "offline":
        _log.info(
            "wandb is offline: `wandb leet %s/wandb` shows it, `wandb sync %s/wandb/offline-*` uploads it",
            *[folder] * 2,
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Its file is written every 15 seconds otherwise, and a run that is killed before has none.
    settings = wandb.Settings(silent=True, console="off", x_transaction_log_flush_interval=1.0)
    return WandbLogger(**options, resume="allow", mode=mode, settings=settings)


def online_or_offline() -> str:
    """What `WANDB_MODE` says, or else whether credentials are configured; nobody is asked, nothing is sent."""
    import wandb

    return os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")


def preempted() -> None:
    """Tell wandb that this run was stopped from outside and is to go on: a sweep's agent would start it again."""
    if wandb := _in_use():
        wandb.mark_preempting()


def finish(succeeded: bool) -> None:
    """End this process's wandb run, if it has one."""
    if wandb := _in_use():
        wandb.finish(exit_code=0 if succeeded else 1)


def _in_use() -> Any:
    """The package, where it was imported, to its end, and has a run."""
    wandb = sys.modules.get("wandb")
    return wandb if getattr(wandb, "run", None) is not None else None
