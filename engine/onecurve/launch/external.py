"""Ranks that torchrun or SLURM started: they take rank zero's configuration before a process group exists."""

import os
import pickle
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import yaml
from omegaconf import DictConfig, OmegaConf

from onecurve.config.resolve import resolve_config, runs_in_single_process
from onecurve.errors import UserError
from onecurve.identity.option_kinds import flatten_config
from onecurve.process.devices import device_count

_PATIENCE = timedelta(seconds=30)  # until the terminal shows which ranks are missing
_TIMEOUT = timedelta(minutes=10)  # for the slowest node to start


def connect_ranks(env: Any) -> dist.Store:
    """Return a store that all ranks of a ClusterEnvironment share: that of torchrun's agent, or else one of rank zero.

    With `multi_tenant`, the process group later uses the same server (torch/distributed/rendezvous.py). A temporary
    process group would leave addresses behind that break Lightning's own.
    """
    is_of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = env.global_rank() == 0 and not is_of_agent
    address, port, ranks = env.main_address, env.main_port, env.world_size()
    try:
        store = dist.TCPStore(address, port, ranks, is_server, _TIMEOUT, wait_for_workers=False, multi_tenant=True)
    except dist.DistNetworkError as error:
        if not is_server:  # nothing else may report it, if there is no rank zero
            place = f"at MASTER_ADDR={address}, MASTER_PORT={port} in {_TIMEOUT}"
            raise SystemExit(f"error: rank {env.global_rank()} finds no rank zero {place}: start it too") from None
        raise UserError(f"cannot listen on port {port} of this host: set MASTER_PORT to another port") from error
    # The agent's store keeps the keys of an earlier start. Without it, the hosts may count their starts differently.
    start = os.environ["TORCHELASTIC_RESTART_COUNT"] if is_of_agent else "0"
    return dist.PrefixStore(f"configuration/{start}", store)


def share_config(store: dist.Store, rank: int, world_size: int, cfg: DictConfig) -> DictConfig:
    """Resolve rank zero's composed configuration, and return it on every rank; a user error is raised on every rank."""
    store.set(f"composed/{rank}", OmegaConf.to_yaml(cfg, sort_keys=True))
    failure: Exception | None = None
    if rank == 0:
        result: DictConfig | UserError
        try:
            result = _resolve(store, world_size, cfg)
        except Exception as error:  # any, or the other ranks would wait
            failure = error
            result = error if isinstance(error, UserError) else UserError(f"rank 0 failed: {error}")
        store.set("result", pickle.dumps(result))  # type: ignore[arg-type]
    try:
        result = pickle.loads(store.get("result"))
    except dist.DistStoreError:
        raise UserError(f"rank {rank} has waited for rank zero for {_TIMEOUT}") from None
    store.set(f"read/{rank}", "")
    if rank == 0:  # it may host the store, which must outlive the other ranks' reading
        missing_ranks(store, "read", world_size, _PATIENCE if failure else _TIMEOUT)
    if failure:
        raise failure
    if isinstance(result, UserError):
        raise result
    return result


def _resolve(store: dist.Store, world_size: int, cfg: DictConfig) -> DictConfig:
    """Return the resolved configuration, once all ranks have sent the same composed one."""
    _wait_for_ranks(store, world_size)
    _check_same_options([store.get(f"composed/{rank}") for rank in range(world_size)])
    if cfg.launch.elastic is True:  # torchrun or SLURM may have given this start other devices and nodes
        nodes = int(os.environ.get("GROUP_WORLD_SIZE") or os.environ["SLURM_NNODES"])
        cfg.trainer.num_nodes, cfg.trainer.devices = nodes, world_size // nodes
    cfg = resolve_config(cfg)
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


def missing_ranks(store: dist.Store, name: str, world_size: int, limit: timedelta) -> list[int]:
    """Wait until each rank has set its key `name/RANK`; return the ranks that have not within the limit."""
    keys = [f"{name}/{rank}" for rank in range(world_size)]
    try:
        store.wait(keys, limit)
    except dist.DistStoreError:
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def _wait_for_ranks(store: dist.Store, world_size: int) -> None:
    """Wait for the options of each rank, and say after some time for whom; raise a UserError if one does not come."""
    for limit in (_PATIENCE, _TIMEOUT):
        if not (missing := missing_ranks(store, "composed", world_size, limit)):
            return
        print(f"waiting for rank {', '.join(map(str, missing))} of {world_size}", file=sys.stderr)
    raise UserError(f"no answer in {_TIMEOUT}: start all {world_size} ranks at once, with the same command")


def _check_same_options(composed: list[bytes]) -> None:
    for rank, text in enumerate(composed):
        if text != composed[0]:
            first, own = (flatten_config(yaml.safe_load(options)) for options in (composed[0], text))
            names = [name for name in [*first, *own] if repr(first.get(name, "?")) != repr(own.get(name, "?"))]
            raise UserError(
                f"process {rank} was started with another {next(iter(names), 'configuration')} than process 0: "
                "give every process the same command and the same files under conf/"
            )
