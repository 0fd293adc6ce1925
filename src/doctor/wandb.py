"""The login to Weights & Biases."""

import os
from typing import Any

from omegaconf import DictConfig

from src.run.build import build
from src.utils.errors import UserError

_TIMEOUT = 8  # seconds for an answer of the server


def check_wandb(cfg: DictConfig) -> str:
    """Check the W&B key and the connection, unless the run is offline."""
    if "wandb" not in cfg.logger:
        return "not used: there is no logger.wandb"
    import wandb

    from src.loggers.wandb import online_or_offline

    build(cfg.logger.wandb)  # checks its options and WANDB_MODE
    asked = os.environ.get("WANDB_MODE")
    try:
        if (mode := online_or_offline()) == "online":
            return _account(wandb)
    except Exception as error:  # of wandb, requests or its service: a run would go offline as well
        reason = " ".join(str(error).split())
        raise UserError(
            f"no login ({reason}): check the key (`wandb login --relogin`) and the network (HTTPS_PROXY, or "
            "WANDB_BASE_URL for your own server), or set WANDB_MODE=offline"
        ) from None
    if asked == "online":
        raise UserError("WANDB_MODE=online, but no API key is configured: run `wandb login`, or set WANDB_API_KEY")
    if asked:
        return f"{mode}, because WANDB_MODE={asked}"
    return "offline, because no API key is configured; `wandb login` changes that"


def _account(wandb: Any) -> str:
    """Return the account of the configured key, as the server knows it."""
    try:
        return f"online as {wandb.Api(timeout=_TIMEOUT).viewer.username}"
    finally:
        wandb.teardown()
