"""What each strategy needs for a run, and which one is the fastest: `plan=true` and `strategy=best`."""

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

BEST = "best"


def with_best_strategy(cfg: DictConfig) -> DictConfig:
    """Return a composed configuration, with another strategy in the place of `strategy=best`."""
    if HydraConfig.get().runtime.choices.get("strategy") != BEST:
        return cfg
    from src.engine.plan.plan import choose_strategy  # late, because it imports Lightning

    return choose_strategy(cfg)
