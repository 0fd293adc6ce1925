"""Ranks that torchrun or SLURM started: they take rank zero's configuration before a process group exists."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import yaml
from omegaconf import DictConfig

from src.engine.config.devices import device_count, runs_in_single_process
from src.engine.utils.errors import UserError
from src.engine.utils.overrides import flatten_config

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


def connect_ranks(env: ClusterEnvironment) -> dist.Store:
    """Return a store that all ranks share: that of torchrun's agent, or else one of rank zero on its own port.

    A temporary process group would leave addresses behind that break Lightning's own.

    Raises:
        UserError: if a port of rank zero is in use.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    port = env.main_port if agent else config_store_port(env.main_port)
    is_server = env.global_rank() == 0 and not agent
    if is_server:
        for server_port in (port, env.main_port):  # the second is the process group's
            check_port_is_free(server_port, "MASTER_PORT")
    store = dist.TCPStore(env.main_address, port, env.world_size(), is_server, timeout=_STORE_TIMEOUT)
    if agent:  # it keeps the keys of an earlier start
        return dist.PrefixStore(f"configuration/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    return store


def config_store_port(main_port: int) -> int:
    """Return the port of rank zero's store.

    It is 10,000 away from MASTER_PORT, because neighboring jobs use the ports close to it.
    """
    return main_port + (10_000 if main_port < 50_000 else -10_000)


def check_port_is_free(port: int, option: str) -> None:
    """Check that this process can listen on the port, which follows from the value of `option`."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise UserError(
                f"cannot listen on port {port} of this host ({error.strerror}): set {option} to another port"
            ) from None


def share_config(
    store: dist.Store, rank: int, world_size: int, composed: str, resolve: Callable[[], DictConfig]
) -> DictConfig:
    """Return rank zero's resolved configuration on every rank.

    Args:
        store: key-value store of all ranks.
        rank: the rank of this process.
        world_size: number of ranks.
        composed: this rank's composed configuration as YAML, before interpolations are resolved.
        resolve: function that returns the resolved configuration; called on rank zero only.

    Raises:
        UserError: on all ranks, if `resolve` raised one, or the composed configurations differ.
    """
    store.set(f"composed/{rank}", composed)
    if rank == 0:
        result = _config_or_error(store, world_size, resolve)
        store.set("result", pickle.dumps(result))  # type: ignore[arg-type]
    result = pickle.loads(store.get("result"))
    store.add("read", 1)
    # Rank zero may host the store, so it continues only when all ranks have read the result.
    while rank == 0 and store.add("read", 0) < world_size:
        time.sleep(0.05)
    if isinstance(result, UserError):
        raise result
    return result


def _config_or_error(store: dist.Store, world_size: int, resolve: Callable[[], DictConfig]) -> DictConfig | UserError:
    """Return the error instead of raising it, so that every rank can raise it."""
    try:
        check_same_options([store.get(f"composed/{rank}") for rank in range(world_size)])
        cfg = resolve()
        _check_world_size(cfg, world_size)
        return cfg
    except UserError as error:
        return error


def check_same_options(composed: list[bytes]) -> None:
    """Check that all ranks composed the same configuration; the error names the first option that differs."""
    for rank, text in enumerate(composed):
        if text == composed[0]:
            continue
        first, other = _options(composed[0]), _options(text)
        names = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if names:  # otherwise only the order of the options differs
            name = names[0]
            raise UserError(
                f"process {rank} was started with {name}={other.get(name)}, process 0 with {name}={first.get(name)}: "
                "give every process the same command and the same files under conf/"
            )


def _options(composed: bytes) -> dict[str, Any]:
    return flatten_config(yaml.safe_load(composed))


def _check_world_size(cfg: DictConfig, world_size: int) -> None:
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
