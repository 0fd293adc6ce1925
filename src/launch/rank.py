"""One rank's life, whoever started its process: its log, its share of the cores, the run, and a clean end."""

import os
import sys

import torch
import torch.distributed as dist
from hydra.utils import get_object
from omegaconf import DictConfig

from src.launch.config import device_count
from src.launch.logs import log_to_folder


def run_rank(cfg: DictConfig, rank: int) -> dict[str, float]:
    """Train and test in this process; return the final metrics."""
    from src.experiment import run  # late: it imports Lightning, which the process that only launches need not

    log_to_folder(cfg.run_dir, rank)
    if cfg.trainer.accelerator == "cpu" and (sharers := device_count(cfg.trainer)) > 1:
        _share_cores(sharers)
    try:
        return run(cfg)
    finally:
        _destroy_group(failed=sys.exc_info()[0] is not None)


def drives_all_devices(cfg: DictConfig) -> bool:
    """Whether the strategy wants one process per node, and does the rest itself."""
    return getattr(get_object(cfg.strategy._target_), "single_process", False)


def _share_cores(processes: int) -> None:
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for processes that this one may spawn


def _destroy_group(failed: bool) -> None:
    """A gloo process that exits with its group alive may abort.

    NCCL's destruction may wait for a rank that has failed: there, the end of the process does it.
    """
    if dist.is_available() and dist.is_initialized() and not (failed and dist.get_backend() == "nccl"):
        dist.destroy_process_group()
