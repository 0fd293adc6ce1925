"""Ranks that torchrun or SLURM started: detect them, connect them, and check their number."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from omegaconf import DictConfig

from src.run.devices import device_count, runs_in_single_process
from src.utils.errors import UserError

if TYPE_CHECKING:
    from lightning.pytorch.plugins.environments import ClusterEnvironment

_STORE_TIMEOUT = timedelta(minutes=10)  # for the slowest node to start


def detect_cluster_environment() -> ClusterEnvironment | None:
    """Return the environment of torchrun or SLURM, or None if neither started this process as one of several ranks."""
    if not {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS"} & os.environ.keys():
        return None
    from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

    if TorchElasticEnvironment.detect():
        return TorchElasticEnvironment()
    if SLURMEnvironment.detect() and int(os.environ.get("SLURM_NTASKS", 1)) > 1:
        return SLURMEnvironment(auto_requeue=False)
    return None


def rendezvous(env: ClusterEnvironment) -> dist.Store:
    """Return a store through which the ranks get the configuration before a process group exists.

    It is the store of torchrun's agent if there is one, otherwise a TCPStore of rank zero on its own port. A temporary
    process group would leave addresses behind that break Lightning's own.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = env.main_port if agent else config_store_port(env.main_port)
    is_server = env.global_rank() == 0 and not agent
    if is_server:
        for server_port in (port, env.main_port):  # the second is the process group's
            check_port_is_free(server_port, "MASTER_PORT")
    store = dist.TCPStore(env.main_address, port, env.world_size(), is_server, timeout=_STORE_TIMEOUT)
    return dist.PrefixStore(f"configuration/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def config_store_port(main_port: int) -> int:
    """Return the port of rank zero's store.

    It is 10,000 away from MASTER_PORT, because neighboring jobs use the ports close to it.
    """
    return main_port + (10_000 if main_port < 50_000 else -10_000)


def check_port_is_free(port: int, option: str) -> None:
    """Check that this process can listen on the port, which follows from the value of `option`.

    Raises:
        UserError: if not.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            reason = error.strerror
            raise UserError(
                f"cannot listen on port {port} of this host ({reason}): set {option} to another port"
            ) from None


def check_world_size(cfg: DictConfig, world_size: int) -> DictConfig:
    """Return the configuration after a check that it matches the number of started processes.

    Raises:
        UserError: if it does not, or the strategy runs in a single process.
    """
    configured = device_count(cfg.trainer) * cfg.trainer.num_nodes
    if configured != world_size:
        raise UserError(
            f"{world_size} processes were started, but trainer.devices x trainer.num_nodes is {configured}: "
            "set them so that both are equal"
        )
    if runs_in_single_process(cfg):
        raise UserError(
            "this strategy runs in one process, but torchrun or srun started several: use strategy=ddp with them"
        )
    return cfg
