"""Process entry of one rank: log file, CPU threads, run, shutdown."""

import os

import torch
from omegaconf import DictConfig

from src.run.devices import device_count
from src.utils.gc_pause import gc_paused
from src.utils.process_group import close_process_group
from src.utils.rank_log import log_to_folder
from src.utils.signals import Stopped


def run_rank(cfg: DictConfig, rank: int) -> dict[str, float]:
    """Train and test in this process; return the final metrics.

    After an error the process group stays open: closing it would fail the other ranks before this one has reported its
    error, and NCCL might wait for them.
    """
    with gc_paused():
        from src.run.experiment import run  # late: it imports Lightning, which the process that only launches need not

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
