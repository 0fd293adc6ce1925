"""What each strategy needs for a run, and which one is the fastest: `plan=true` and `strategy=best`."""

import hashlib
import json
import socket
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from src.engine.config.folder import PROJECT
from src.engine.config.resolve import device_count
from src.engine.utils.files import atomic_write

BEST = "best"
_MAX_KNOWN = 1000  # entries of a file, of which older ones are dropped
# The options, besides those of the strategy and the number of devices, that decide the time of a step.
_GROUPS = ("data", "model", "module", "optimizer", "hardware")
_TRAINER = ("num_nodes", "accumulate_grad_batches", "precision", "sync_batchnorm")


def plan_strategy(cfg: DictConfig) -> None:
    """Replace `strategy=best`, and set the planned time of a step, which any run has that was part of a plan.

    Args:
        cfg: the composed configuration, in which devices are resolved and interpolations are not.
    """
    if HydraConfig.get().runtime.choices.get("strategy") == BEST:
        from src.engine.plan.plan import choose_strategy  # late, because it imports Lightning

        choose_strategy(cfg)
    else:
        cfg.runtime.planned_step_ms = known("plans.json").get(plan_key(cfg, cfg.strategy))


def plan_key(cfg: DictConfig, strategy: DictConfig) -> str:
    """Return a name for all that decides the planned time of a step."""
    groups = OmegaConf.masked_copy(cfg, [name for name in _GROUPS if name in cfg])
    trainer = [device_count(cfg.trainer), *(cfg.trainer.get(name) for name in _TRAINER)]
    host = "" if cfg.hardware.get("tflops") else socket.gethostname()
    text = f"{OmegaConf.to_yaml(groups)} {OmegaConf.to_yaml(strategy)} {trainer} {host}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def known(name: str) -> dict[str, Any]:
    """Return what `remember` has kept in a file of the folder runs/."""
    file = PROJECT / "runs" / name
    return json.loads(file.read_text()) if file.exists() else {}


def remember(name: str, values: dict[str, Any]) -> None:
    """Keep some values in a file of the folder runs/."""
    file = PROJECT / "runs" / name
    file.parent.mkdir(exist_ok=True)
    kept = list((known(name) | values).items())[-_MAX_KNOWN:]
    with atomic_write(file) as part:
        part.write_text(json.dumps(dict(kept), indent=1))
