"""Weights & Biases: online where a key is configured, otherwise offline, with a line that says what to do with it."""

import logging
import os
from pathlib import Path

import wandb
from lightning.pytorch.loggers import WandbLogger

_log = logging.getLogger(__name__)


def wandb_logger(
    project: str, run_id: str, folder: str, group: str | None = None, tags: list[str] | None = None
) -> WandbLogger:
    """The logger of one training run, whatever the number of its processes and however often it is resumed."""
    mode = online_or_offline()
    if mode == "offline":
        _log.info(
            "wandb is offline: `wandb leet %s/wandb` shows it, `wandb sync %s/wandb/offline-*` uploads it",
            *[folder] * 2,
        )
    Path(folder).mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(silent=True, console="off")
    return WandbLogger(
        project=project,
        name=run_id,
        id=run_id,
        resume="allow",
        save_dir=folder,
        group=group,
        tags=tags,
        mode=mode,
        settings=settings,
    )


def online_or_offline() -> str:
    """What `WANDB_MODE` says, or else whether credentials are configured; nobody is asked, nothing is sent."""
    return os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")


def preempted() -> None:
    """Tell wandb that this run was stopped from outside and is to go on: a sweep's agent would start it again."""
    if wandb.run is not None:
        wandb.mark_preempting()


def finish(succeeded: bool) -> None:
    """End this process's wandb run, if it has one."""
    if wandb.run is not None:
        wandb.finish(exit_code=0 if succeeded else 1)
