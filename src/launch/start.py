"""How the processes of a run come to be: here, in fresh workers of torch's elastic launcher, or they exist already.

The configuration is composed once, in the process the user started, which never touches a device; every rank gets
that very object. No command line is rebuilt, and a job leaves nothing behind for the next one of a sweep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from src.launch.agreement import agree
from src.launch.external import checked, external, rendezvous
from src.launch.hosts import rendezvous_hosts
from src.launch.rank import run_rank
from src.launch.workers import launch_workers
from src.run.resolve import device_count, prepare, runs_in_single_process
from src.utils.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment


def launch(
    cfg: DictConfig, share: Callable[[DictConfig], AbstractContextManager[Any]] = nullcontext
) -> dict[str, float]:
    """Run the job on all its ranks, within its `share` of the machine; return rank zero's final metrics.

    Raises:
        UserError: what the first rank to fail found wrong; it has already ended the others.
    """
    if env := external():
        return _join(env, cfg)
    cfg, host = (prepare(cfg), 0) if cfg.trainer.num_nodes == 1 else _of_all_hosts(cfg)
    devices = device_count(cfg.trainer)
    _check_possible(cfg, devices)
    if devices == cfg.trainer.num_nodes == 1 and HydraConfig.get().mode == RunMode.RUN:
        return run_rank(cfg, rank=0)
    with share(cfg):
        return launch_workers(cfg, 1 if runs_in_single_process(cfg) else devices, host)


def _join(env: ClusterEnvironment, cfg: DictConfig) -> dict[str, float]:
    """Be one of the ranks that torchrun or SLURM started; what rank zero finds wrong, it alone says."""
    try:
        rank, world_size = env.global_rank(), env.world_size()
        store = rendezvous(env)
        cfg = agree(store, rank, world_size, OmegaConf.to_yaml(cfg), lambda: checked(prepare(cfg), world_size))
    except UserError:
        if env.global_rank() > 0:
            raise SystemExit(1) from None
        raise
    return run_rank(cfg, env.global_rank())


def _of_all_hosts(cfg: DictConfig) -> tuple[DictConfig, int]:
    """The configuration of the run of which this is one host's launcher, and that host's number."""
    hydra_cfg, nodes = HydraConfig.get(), cfg.trainer.num_nodes
    if not cfg.launch.endpoint or hydra_cfg.mode == RunMode.MULTIRUN:
        raise UserError(
            f"trainer.num_nodes={nodes}: this command starts processes on its own host only; type it on each, with "
            "launch.endpoint=HOST:PORT of one of them, or start train.py by torchrun or srun; no sweep does that"
        )
    store, number = rendezvous_hosts(cfg.launch.endpoint, nodes, cfg.launch.rendezvous_timeout)
    cfg = agree(store, number, nodes, OmegaConf.to_yaml(cfg), lambda: prepare(cfg))
    folder = Path(hydra_cfg.runtime.output_dir)
    if str(folder) != cfg.run_dir:
        with contextlib.suppress(OSError):  # the one that Hydra has made here, unless something came to be in it
            folder.rmdir()
    return cfg, number


def _check_possible(cfg: DictConfig, devices: int) -> None:
    if cfg.trainer.num_nodes > 1 and runs_in_single_process(cfg):
        raise UserError("this strategy drives one host's devices from one process: use strategy=ddp on several")
    if devices > 1 and not dist.is_available():
        raise UserError(
            f"trainer.devices={devices} needs torch.distributed, which this build of torch lacks: "
            "install one that has it, or set trainer.devices=1"
        )
