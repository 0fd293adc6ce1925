"""Communication between processes: libraries, ports and network interfaces."""

import os
import socket

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from src.launch.external import check_port_is_free, config_store_port, detect_cluster_environment
from src.utils.errors import UserError

_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check_backends(cfg: DictConfig) -> str:
    """Check that this build of torch has gloo, and NCCL for GPUs."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise UserError(f"torch {torch.__version__} has no torch.distributed with gloo: install an official build")
    if not torch.cuda.is_available():
        return "gloo"
    if not dist.is_nccl_available():
        raise UserError(f"torch {torch.__version__} has no NCCL, which GPUs need: install an official build for CUDA")
    return f"gloo, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def check_ports(cfg: DictConfig) -> str:
    """Check the ports that the start of the ranks uses on this host, if it uses any known ones."""
    env = detect_cluster_environment()
    if env and os.environ.get("TORCHELASTIC_RUN_ID"):
        return f"torchrun listens on port {env.main_port}"
    if env:
        ports = (env.main_port, config_store_port(env.main_port))
        if env.global_rank() == 0:
            for port in ports:
                check_port_is_free(port, "MASTER_PORT")
        return f"{ports[0]} and {ports[1]} of {env.main_address}"
    return "any free port of this host"


def check_interfaces(cfg: DictConfig) -> str:
    """Check that configured network interfaces exist, and that gloo does not choose the loopback interface."""
    names = [name for _, name in socket.if_nameindex()]
    for variable in _INTERFACES:
        value = os.environ.get(variable, "")
        wanted = [part.lstrip("=") for part in value.split(",") if part and not value.startswith("^")]
        for prefix in wanted:
            if not any(name.startswith(prefix) for name in names):
                raise UserError(f"{variable}={value}: this host has no {prefix}, but {', '.join(names)}")
    if cfg.trainer.num_nodes > 1 and "GLOO_SOCKET_IFNAME" not in os.environ:
        _check_own_address(names)
    return ", ".join(names)


def _check_own_address(names: list[str]) -> None:
    """Check that the name of this host stands for an address that other hosts can reach; gloo listens there."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "no address"
    if address == "no address" or address.startswith("127."):
        raise UserError(
            f"the host name {host} has {address}, to which other hosts cannot connect: set GLOO_SOCKET_IFNAME to the "
            f"interface that connects the hosts ({', '.join(names)}), or correct /etc/hosts"
        )
