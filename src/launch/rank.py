"""One rank's life, whoever started its process: its log, its share of the cores, the run, and a clean end."""

import os

import torch
import torch.distributed as dist
from hydra.utils import get_object
from omegaconf import DictConfig

from src.launch.config import device_count
from src.launch.logs import log_to_folder
from src.launch.signals import Stopped


def run_rank(cfg: DictConfig, rank: int) -> dict[str, float]:
    """Train and test in this process; return the final metrics.

    If that fails, the process group is left for the end of the process: closing it here would fail the other ranks
    before this one has told its error, and NCCL's might wait for them.
    """
    from src.experiment import run  # late: it imports Lightning, which the process that only launches need not

    log_to_folder(cfg.run_dir, rank)
    if cfg.trainer.accelerator == "cpu" and (sharers := device_count(cfg.trainer)) > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // sharers))
    try:
        metrics = run(cfg)
    except Stopped:  # on all ranks at once
        close_process_group()
        raise
    close_process_group()
    return metrics


def close_process_group() -> None:
    """Leave the others: a gloo process that exits with its group alive may abort."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def drives_all_devices(cfg: DictConfig) -> bool:
    """Whether the strategy wants one process per node, and does the rest itself."""
    return getattr(get_object(cfg.strategy._target_), "single_process", False)
