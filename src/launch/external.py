"""Ranks that torchrun or SLURM started: recognised, checked against the configuration, and given rank zero's."""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
import yaml
from omegaconf import DictConfig

from src.errors import UserError
from src.launch.config import device_count, leaves
from src.launch.rank import drives_all_devices

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


def agree(env: ClusterEnvironment, composed: str, prepare: Callable[[], DictConfig]) -> DictConfig:
    """Rank zero's configuration, on every rank; if it is at fault, every rank learns so.

    Args:
        env: what started the ranks.
        composed: the configuration that this rank was started with, as YAML, nothing of it resolved.
        prepare: gives the resolved one; called on rank zero.

    Raises:
        UserError: what rank zero found wrong, that the ranks are not as many as configured, or that they were started
            with different configurations.
    """
    rank, world_size = env.global_rank(), env.world_size()
    store = _store(env)
    store.set(f"hash/{rank}", hashlib.sha256(composed.encode()).hexdigest())
    store.set(f"composed/{rank}", composed)
    if rank == 0:
        store.set("outcome", pickle.dumps(_outcome(store, prepare, world_size)))  # type: ignore[arg-type]
    outcome = pickle.loads(store.get("outcome"))
    store.add("read", 1)
    while rank == 0 and store.add("read", 0) < world_size:  # it may be this process that holds the store
        time.sleep(0.05)
    if isinstance(outcome, UserError):
        raise outcome
    return outcome


def _store(env: ClusterEnvironment) -> dist.Store:
    """Where the ranks meet before there is a process group.

    It is the store of torchrun's agent, or else one of rank zero's own, on a port beside the job's: a process group
    here, made and destroyed, would leave its addresses behind for Lightning's to stumble over.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    other = env.main_port + (10_000 if env.main_port < 50_000 else -10_000)  # jobs beside this one have the near ones
    port = env.main_port if agent else other
    hosts = env.global_rank() == 0 and not agent
    if hosts:
        for wanted in (port, env.main_port):  # the second is the process group's
            _check_free(wanted)
    store = dist.TCPStore(env.main_address, port, env.world_size(), hosts, timeout=_PATIENCE)
    return dist.PrefixStore(f"configuration/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _check_free(port: int) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(f"port {port} of this host cannot be had ({error.strerror}): set MASTER_PORT") from None


def _outcome(store: dist.Store, prepare: Callable[[], DictConfig], world_size: int) -> DictConfig | UserError:
    try:
        _check_same(store, world_size)
        return _checked(prepare(), world_size)
    except UserError as error:
        return error


def _check_same(store: dist.Store, world_size: int) -> None:
    for rank in range(1, world_size):
        if store.get(f"hash/{rank}") != store.get("hash/0"):
            ours, theirs = (leaves(yaml.safe_load(store.get(f"composed/{which}"))) for which in (0, rank))
            name = min(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            raise UserError(
                f"rank {rank} was started with {name}={theirs.get(name)}, rank 0 with {name}={ours.get(name)}: "
                "give every process the same command and the same files under conf/"
            )


def _checked(cfg: DictConfig, world_size: int) -> DictConfig:
    configured = device_count(cfg.trainer) * cfg.trainer.num_nodes
    if configured != world_size:
        raise UserError(
            f"{world_size} processes were started, but trainer.devices x trainer.num_nodes is {configured}: "
            "make the two agree"
        )
    if drives_all_devices(cfg):
        raise UserError("this strategy starts its own processes, so torchrun or srun must not: use strategy=ddp there")
    return cfg
