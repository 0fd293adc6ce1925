"""What each strategy needs for a run, and which one is the fastest: `plan=true` and `strategy=best`."""

import hashlib
import json
import socket
from contextlib import suppress
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from onecurve.config.folder import PROJECT
from onecurve.config.resolve import device_count
from onecurve.utils.files import atomic_write

BEST = "best"
PLANS = "plans.json"  # the milliseconds of a step by `plan_key`
_MAX_CACHED = 1000  # entries of a file, of which older ones are dropped
# The options, besides those of the strategy and the number of devices, that decide the time of a step.
_GROUPS = ("data", "model", "module", "optimizer", "hardware")
_TRAINER = ("num_nodes", "accumulate_grad_batches", "precision", "sync_batchnorm")


def plan_strategy(cfg: DictConfig) -> None:
    """Replace `strategy=best`, and set the planned time of a step if a plan is known that has it.

    Args:
        cfg: the composed configuration, in which devices are resolved and interpolations are not.
    """
    if HydraConfig.get().runtime.choices.get("strategy") == BEST:
        from onecurve.plan.plan import choose_strategy  # late, because it imports Lightning

        choose_strategy(cfg)
    else:
        plans = read_cache(PLANS)
        cfg.runtime.planned_step_ms = plans.get(plan_key(cfg, cfg.strategy)) if plans else None


def plan_key(cfg: DictConfig, strategy: DictConfig) -> str:
    """Return a name for all that decides the planned time of a step."""
    groups = OmegaConf.masked_copy(cfg, [name for name in _GROUPS if name in cfg])
    trainer = [device_count(cfg.trainer), *(cfg.trainer.get(name) for name in _TRAINER)]
    if not OmegaConf.select(cfg, "hardware.tflops"):
        trainer += [cfg.trainer.accelerator, socket.gethostname()]
    text = f"{OmegaConf.to_yaml(groups)} {OmegaConf.to_yaml(strategy)} {trainer}"
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def read_cache(name: str) -> dict[str, Any]:
    """Return the content of a file in the folder runs/; an unreadable one is no reason to end a run."""
    with suppress(OSError, ValueError):
        content = json.loads((PROJECT / "runs" / name).read_text())
        return content if isinstance(content, dict) else {}
    return {}


def update_cache(name: str, values: dict[str, Any]) -> None:
    """Add some values to a file in the folder runs/, if it can be written. Of two writers at once the last one wins."""
    file = PROJECT / "runs" / name
    older = [pair for pair in read_cache(name).items() if pair[0] not in values]
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        with atomic_write(file) as part:
            part.write_text(json.dumps(dict([*older, *values.items()][-_MAX_CACHED:]), indent=1))
