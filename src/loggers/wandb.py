"""Weights & Biases logger: online if a key is configured, otherwise offline, with a hint how to view and upload it."""

import contextlib
import logging
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from src.loggers.async_logger import AsyncLogger
from src.utils.errors import UserError, suggest

_log = logging.getLogger(__name__)
_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
_CONNECT_TIMEOUT = 20.0  # seconds


def wandb_logger(
    project: str, run_id: str, folder: str, group: str | None = None, tags: list[str] | None = None
) -> AsyncLogger:
    """Return the logger of one training run, which stays one W&B run however often it is resumed.

    wandb takes a second to import and to start, and longer if it waits for its server. Training does not wait for it.

    Raises:
        UserError: if the environment variable WANDB_MODE has no valid value.
    """
    mode = os.environ.get("WANDB_MODE")
    if mode and mode not in _MODES:
        raise UserError(f"WANDB_MODE={mode}: {suggest(mode, _MODES)}")
    options = {"project": project, "name": run_id, "id": run_id, "save_dir": folder, "group": group, "tags": tags}
    return AsyncLogger(partial(_start_run, folder, options), version=run_id)


def _start_run(folder: str, options: dict[str, Any]) -> Any:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    Path(folder).mkdir(parents=True, exist_ok=True)
    # By default wandb writes its file every 15 seconds, so a run killed before that would have none.
    settings = wandb.Settings(silent=True, console="off", x_transaction_log_flush_interval=1.0)
    if "WANDB_INIT_TIMEOUT" not in os.environ:
        settings.init_timeout = _CONNECT_TIMEOUT
    mode = online_or_offline()
    if mode == "online":
        try:
            logger = WandbLogger(**options, resume="allow", mode=mode, settings=settings)
            logger.experiment  # noqa: B018  # it connects
            return logger
        except Exception as error:
            mode = "offline"
            _log.warning("wandb cannot start online: %s", str(error).strip().split("\n")[0])
            with contextlib.suppress(SystemExit):
                wandb.teardown()  # its service still holds the run's id
    if mode == "offline":
        _log.info(
            "wandb is offline: `wandb leet %s/wandb` shows it, `wandb sync %s/wandb/offline-*` uploads it",
            folder,
            folder,
        )
    return WandbLogger(**options, resume="allow", mode=mode, settings=settings)


def online_or_offline() -> str:
    """Return `WANDB_MODE`, or whether credentials are configured; this neither prompts nor connects."""
    import wandb

    return os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")


def mark_preempted() -> None:
    """Mark this run as preempted in wandb, so that the agent of a W&B sweep starts it again."""
    _call_wandb("mark_preempting")


def finish_run(succeeded: bool) -> None:
    """End this process's wandb run, if it has one."""
    _call_wandb("finish", exit_code=0 if succeeded else 1)


def _call_wandb(function: str, **options: Any) -> None:
    """Call a function of wandb, if the package is completely imported and has a run. Its failure is a warning only."""
    wandb = sys.modules.get("wandb")
    if getattr(wandb, "run", None) is None:
        return
    try:
        getattr(wandb, function)(**options)
    except Exception as error:  # whatever it is, it must not change how the run ends
        _log.warning("wandb failed at the end of the run: %s: %s", type(error).__name__, error)
