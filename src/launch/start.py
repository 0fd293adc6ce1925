"""Start the processes of a run with torch's elastic launcher, or join those that torchrun or SLURM started.

The configuration is composed once, in the process that the user started, which never touches a device. Every rank
gets that very object. No command line is rebuilt, and a job of a sweep leaves nothing behind for the next one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from src.launch.config_sync import sync_config
from src.launch.external import check_world_size, detect_cluster_environment, rendezvous
from src.launch.hosts import rendezvous_hosts
from src.launch.outcome import run_recorded
from src.launch.rank import run_rank
from src.launch.rank_exit import exit_started_rank
from src.launch.workers import launch_workers
from src.run.devices import device_count, runs_in_single_process
from src.run.resolve import resolve_config
from src.utils.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment


def launch(
    cfg: DictConfig,
    around_workers: Callable[[DictConfig], AbstractContextManager[Any]] = nullcontext,
    keep: Callable[[Any], None] | None = None,
) -> dict[str, float]:
    """Run the job on all its ranks; return rank zero's final metrics.

    Args:
        cfg: the composed configuration.
        around_workers: context manager around the processes that this launcher starts; it gets the resolved
            configuration.
        keep: gets the trainer after the run if this process is a rank.

    Raises:
        UserError: if a rank raised one; the launcher has already stopped the other ranks.
    """
    if env := detect_cluster_environment():
        return _join_started_ranks(env, cfg, keep)
    if cfg.trainer.num_nodes == 1:
        cfg, node_rank = resolve_config(cfg), 0
    else:
        cfg, node_rank = _sync_hosts(cfg)
    devices = device_count(cfg.trainer)
    _check_can_start(cfg, devices)
    is_single = devices == 1 and cfg.trainer.num_nodes == 1
    is_sweep = HydraConfig.get().mode == RunMode.MULTIRUN
    if is_single and not is_sweep and not cfg.launch.max_restarts:
        with run_recorded(cfg):
            return run_rank(cfg, rank=0, keep=keep)
    with around_workers(cfg), run_recorded(cfg, is_recorder=node_rank == 0):
        return launch_workers(cfg, 1 if runs_in_single_process(cfg) else devices, node_rank)


def _join_started_ranks(
    env: ClusterEnvironment, cfg: DictConfig, keep: Callable[[Any], None] | None
) -> dict[str, float]:
    """Run this process as one of the ranks that torchrun or SLURM started; only rank zero prints a user error."""
    rank, world_size = env.global_rank(), env.world_size()
    composed = OmegaConf.to_yaml(cfg)
    try:
        store = rendezvous(env)
        cfg = sync_config(store, rank, world_size, composed, lambda: check_world_size(resolve_config(cfg), world_size))
    except UserError:
        if rank > 0:
            raise SystemExit(1) from None
        raise
    with os.fdopen(os.dup(2), "w") as terminal:  # above rank zero, stderr becomes the rank's log
        try:
            with run_recorded(cfg, is_recorder=rank == 0):
                return run_rank(cfg, rank, keep)
        except Exception as error:
            if dist.is_initialized():
                exit_started_rank(error, cfg.run_dir, rank, terminal)
            raise


def _sync_hosts(cfg: DictConfig) -> tuple[DictConfig, int]:
    """Return the configuration that all hosts share, and the node rank of this host.

    Raises:
        UserError: if there is no endpoint, this is a sweep, or the hosts cannot agree.
    """
    hydra_cfg, nodes = HydraConfig.get(), cfg.trainer.num_nodes
    if not cfg.launch.endpoint or hydra_cfg.mode == RunMode.MULTIRUN:
        raise UserError(
            f"trainer.num_nodes={nodes}: this command starts processes on its own host only. Run it on every host with "
            "launch.endpoint=HOST:PORT of one host, or start train.py with torchrun or srun. A sweep cannot do that"
        )
    store, node_rank = rendezvous_hosts(cfg.launch.endpoint, nodes, cfg.launch.rendezvous_timeout)
    cfg = sync_config(store, node_rank, nodes, OmegaConf.to_yaml(cfg), lambda: resolve_config(cfg))
    _remove_empty_folder(Path(hydra_cfg.runtime.output_dir), cfg.run_dir)
    return cfg, node_rank


def _remove_empty_folder(own: Path, shared: str) -> None:
    """Remove the run folder that Hydra made on this host, if the hosts use another and it is empty."""
    if str(own) != shared:
        with contextlib.suppress(OSError):
            own.rmdir()


def _check_can_start(cfg: DictConfig, devices: int) -> None:
    """Check that the strategy and this build of torch can start so many processes.

    Raises:
        UserError: if not.
    """
    if cfg.trainer.num_nodes > 1 and runs_in_single_process(cfg):
        raise UserError(
            f"trainer.num_nodes={cfg.trainer.num_nodes}: this strategy runs in one process on one host; "
            "use strategy=ddp on several"
        )
    if devices > 1 and not dist.is_available():
        raise UserError(
            f"trainer.devices={devices} needs torch.distributed, which this build of torch lacks: "
            "install one that has it, or set trainer.devices=1"
        )
