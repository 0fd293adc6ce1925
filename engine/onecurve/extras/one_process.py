"""The configuration of a rehearsal on one process, by which a plan and `doctor=true` look at a run."""

import copy
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict


def on_one_process(cfg: DictConfig, folder: str, **trainer: Any) -> DictConfig:
    """Return the resolved configuration of a rehearsal in `folder`, without callbacks, loggers and checkpoint."""
    own = copy.deepcopy(cfg)
    with open_dict(own):
        own.update(run_dir=folder, seed=cfg.seed or 0, ckpt_path=None, predict=None, callbacks={}, logger={})
        own.strategy = {"_target_": "onecurve.parallel.ddp.auto", "devices": 1, "num_nodes": 1}
        own.trainer.update({"devices": 1, "num_nodes": 1, "enable_progress_bar": False} | trainer)
    OmegaConf.resolve(own)
    return own
