"""Process entry of one rank: log file, CPU threads, run, shutdown."""

import os
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig

from src.engine.config.devices import device_count, runs_in_single_process
from src.engine.launch.all_reduce import measure_all_reduce
from src.engine.launch.external import detect_cluster_environment
from src.engine.utils.errors import UserError
from src.engine.utils.process_group import close_process_group
from src.engine.utils.rank_log import log_to_folder
from src.engine.utils.signals import Stopped


def run_rank(cfg: DictConfig, rank: int, keep_trainer: Callable[[Any], None] | None = None) -> dict[str, float]:
    """Run the experiment in this process; return the final metrics, and give `keep_trainer` the trainer.

    With doctor=true, measure an all-reduce instead.

    After an error the process group stays open: closing it would fail the other ranks before this one has reported its
    error, and NCCL might wait for them.

    Raises:
        UserError: if the installed torchvision is not for this torch, or for a reason that `run` names.
    """
    if cfg.doctor:
        return measure_all_reduce(cfg)
    run = _import_run()
    log_to_folder(cfg.run_dir, rank)
    if device_count(cfg.trainer) > 1 and not runs_in_single_process(cfg):
        torch.set_num_threads(max(1, _cores_per_rank(device_count(cfg.trainer))))
    try:
        metrics = run(cfg, keep_trainer)
    except Stopped:  # all ranks stop at the same step, so closing fails none of them
        close_process_group()
        raise
    close_process_group()
    return metrics


def _import_run() -> Callable[..., dict[str, float]]:
    """Import what a rank runs: late, since it imports Lightning, which a process that only launches never uses.

    Lightning imports torchmetrics, which imports torchvision if it is installed (functional/image/arniqa.py).
    """
    try:
        from src.engine.run.experiment import run
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        raise UserError(
            f"the installed torchvision is not for torch {torch.__version__} ({error}): "
            "install the one for it, or `pip uninstall torchvision`"
        ) from error
    return run


def _cores_per_rank(ranks: int) -> int:
    """Return the CPU cores for each of the ranks of this node; torch would use all of them in each process.

    GPU ranks need them as well, for data that is read or transformed on the host. A task of SLURM that has cores of its
    own sees only those.
    """
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    if isinstance(detect_cluster_environment(), SLURMEnvironment) and "SLURM_CPUS_PER_TASK" in os.environ:
        return int(os.environ["SLURM_CPUS_PER_TASK"])
    return len(os.sched_getaffinity(0)) // ranks
