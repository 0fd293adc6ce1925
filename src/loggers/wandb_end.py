"""The end of this process's W&B run, which other code calls without importing wandb."""

import logging
import sys
from typing import Any

_log = logging.getLogger(__name__)


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
