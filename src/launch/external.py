"""Ranks that torchrun or SLURM started: recognised, brought together, and checked against the configuration."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from omegaconf import DictConfig

from src.run.resolve import device_count, runs_in_single_process
from src.utils.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment

PATIENCE = timedelta(minutes=10)  # for the slowest node to start


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


def rendezvous(env: ClusterEnvironment) -> dist.Store:
    """Where the ranks meet before there is a process group.

    It is the store of torchrun's agent, or else one of rank zero's own, on a port beside the job's: a process group
    here, made and destroyed, would leave its addresses behind for Lightning's to stumble over.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = env.main_port if agent else meeting_port(env.main_port)
    hosts = env.global_rank() == 0 and not agent
    if hosts:
        for wanted in (port, env.main_port):  # the second is the process group's
            check_free(wanted, "MASTER_PORT")
    store = dist.TCPStore(env.main_address, port, env.world_size(), hosts, timeout=PATIENCE)
    return dist.PrefixStore(f"configuration/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def meeting_port(main_port: int) -> int:
    """Return the port of rank zero's store: far from the job's own, since jobs beside this one have the near ones."""
    return main_port + (10_000 if main_port < 50_000 else -10_000)


def check_free(port: int, option: str) -> None:
    """Find out whether this process can listen at the port that `option` names.

    Raises:
        UserError: if not.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(f"port {port} of this host cannot be had ({error.strerror}): set {option}") from None


def checked(cfg: DictConfig, world_size: int) -> DictConfig:
    """The configuration, if as many ranks were started as it says.

    Raises:
        UserError: if not, or if its strategy starts its ranks itself.
    """
    configured = device_count(cfg.trainer) * cfg.trainer.num_nodes
    if configured != world_size:
        raise UserError(
            f"{world_size} processes were started, but trainer.devices x trainer.num_nodes is {configured}: "
            "make the two agree"
        )
    if runs_in_single_process(cfg):
        raise UserError("this strategy starts its own processes, so torchrun or srun must not: use strategy=ddp there")
    return cfg
