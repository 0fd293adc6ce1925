"""Ranks that torchrun or SLURM started: recognised, checked against the configuration, and given rank zero's."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from omegaconf import DictConfig

from src.errors import UserError
from src.launch.config import device_count

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment

_PATIENCE = timedelta(minutes=10)  # for the slowest node to start


def external() -> ClusterEnvironment | None:
    """What started this process as one of several ranks, if anything did."""
    if not {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS"} & os.environ.keys():
        return None
    from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if SLURMEnvironment.detect() and int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        return SLURMEnvironment(auto_requeue=False)
    return None


def agree(env: ClusterEnvironment, prepare: Callable[[], DictConfig]) -> DictConfig:
    """Rank zero's configuration, on every rank; if it is at fault, every rank learns so.

    Raises:
        UserError: what rank zero found wrong, or that the ranks are not as many as configured.
    """
    rank, world_size = env.global_rank(), env.world_size()
    # The meeting takes the port below the job's own, which Lightning's process group opens right after.
    port = env.main_port if "TORCHELASTIC_USE_AGENT_STORE" in os.environ else env.main_port - 1
    os.environ.setdefault("MASTER_ADDR", env.main_address)
    address = f"tcp://{env.main_address}:{port}" if port != env.main_port else "env://"
    dist.init_process_group("gloo", address, _PATIENCE, rank=rank, world_size=world_size)
    outcome: list[DictConfig | UserError | None] = [None]
    if rank == 0:
        try:
            outcome = [_checked(prepare(), world_size)]
        except UserError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    dist.destroy_process_group()
    if isinstance(outcome[0], UserError):
        raise outcome[0]
    assert outcome[0] is not None
    return outcome[0]


def _checked(cfg: DictConfig, world_size: int) -> DictConfig:
    configured = device_count(cfg.trainer) * cfg.trainer.num_nodes
    if configured != world_size:
        raise UserError(
            f"{world_size} processes were started, but trainer.devices x trainer.num_nodes is {configured}: "
            "make the two agree"
        )
    return cfg
