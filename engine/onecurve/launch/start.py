"""Decide where the ranks run: in this process, in new ones (`workers.py`), or in those of torchrun or SLURM.

The configuration is composed in the process that the user started, and each rank that it starts gets that very object;
ranks that torchrun or SLURM started take rank zero's. A process that starts ranks never touches a device. No command
line is rebuilt, and a job of a sweep leaves nothing behind for the next one.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from onecurve.config.resolve import device_count, resolve_config
from onecurve.errors import UserError
from onecurve.launch.external import connect_ranks, plan_strategy, share_config
from onecurve.launch.outcome import exit_rank, recorded_command
from onecurve.launch.workers import launch_workers, run_rank
from onecurve.process.launcher import check_tasks_are_started, launcher
from onecurve.process.rank import detect_cluster_environment
from onecurve.process.signals import die_with_parent

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment


def launch(
    cfg: DictConfig,
    around_workers: Callable[[DictConfig], AbstractContextManager[Any]] = nullcontext,
    keep_trainer: Callable[[Any], None] | None = None,
) -> dict[str, float]:
    """Run the job on all its ranks; return rank zero's final metrics.

    Args:
        cfg: the composed configuration.
        around_workers: context manager around the processes that this launcher starts; it gets the resolved
            configuration.
        keep_trainer: gets the trainer after the run if this process is a rank.
    """
    check_tasks_are_started()
    if env := detect_cluster_environment():
        return _join_started_ranks(env, cfg, keep_trainer)
    if cfg.launch.elastic is True:  # a job that was queued again may have one task
        cfg.trainer.num_nodes = int(os.environ.get("SLURM_NNODES", cfg.trainer.num_nodes))
    cfg = resolve_config(cfg, plan_strategy)
    devices = device_count(cfg.trainer)
    if (nodes := cfg.trainer.num_nodes) > 1:
        command = shlex.join(["train.py", *HydraConfig.get().overrides.task])
        raise UserError(
            f"trainer.num_nodes={nodes}: this command starts processes on its own host only. Give each host this "
            f"command, with the name of the first one for HOST: torchrun --nnodes={nodes} --nproc-per-node={devices} "
            f"--rdzv-backend=c10d --rdzv-endpoint=HOST:29500 {command}"
        )
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if devices == 1 and not is_sweep and not cfg.launch.max_restarts:
        with recorded_command(cfg):
            return run_rank(cfg, rank=0, keep_trainer=keep_trainer)
    with around_workers(cfg), recorded_command(cfg):
        return launch_workers(cfg)


def _join_started_ranks(
    env: ClusterEnvironment, cfg: DictConfig, keep_trainer: Callable[[Any], None] | None
) -> dict[str, float]:
    """Run this process as one of the ranks that torchrun or SLURM started; only rank zero prints a user error."""
    rank = env.global_rank()
    if launcher() == "torchrun":  # it leaves its ranks behind if it is killed: they save, and end
        die_with_parent(os.getppid(), signal.SIGTERM)
    try:
        store = connect_ranks(env)  # it lives as long as the run, because the process group may use its server
        cfg = share_config(store, rank, env.world_size(), cfg)
    except UserError:
        if rank > 0:
            raise SystemExit(1) from None
        raise
    with os.fdopen(os.dup(2), "w") as terminal:  # above rank zero, stderr becomes the rank's log
        try:
            with recorded_command(cfg) if rank == 0 else nullcontext():
                return run_rank(cfg, rank, keep_trainer)
        except Exception as error:
            if dist.is_initialized():
                exit_rank(error, cfg.run_dir, rank, terminal)
            raise
