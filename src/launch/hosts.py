"""One run on several hosts: the same command on each starts a launcher, and these connect to `launch.endpoint`."""

import contextlib
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from omegaconf import DictConfig

from src.launch.external import check_port_is_free
from src.utils.errors import UserError


def rendezvous_hosts(endpoint: str | None, count: int, timeout: float) -> tuple[dist.Store, int]:
    """Return a store for the launchers of `count` hosts, and the node rank of this host.

    The host of the endpoint has node rank 0. The store uses the port after the endpoint's; torch's rendezvous uses the
    endpoint itself.

    Args:
        endpoint: HOST:PORT.
        count: number of hosts.
        timeout: seconds to wait for the others.

    Raises:
        UserError: if the endpoint is invalid, its port is not free, or not all hosts connect to it in time.
    """
    host, port = _parse_endpoint(endpoint)
    is_first = _is_this_host(host)
    if is_first:
        check_port_is_free(port + 1, "launch.endpoint")
    try:
        store = dist.TCPStore(host, port + 1, None, is_first, timedelta(seconds=timeout), wait_for_workers=False)
        node_rank = 0 if is_first else store.add("others", 1)
        store.set(f"arrived/{node_rank}", "")
        store.wait([f"arrived/{other}" for other in range(count)], timedelta(seconds=timeout))
    except dist.DistError as error:
        raise UserError(
            f"launch.endpoint={endpoint}: not all of trainer.num_nodes={count} hosts connected within {timeout:.0f} "
            "seconds: start the same command on each, with an endpoint that all can reach"
        ) from error
    return store, node_rank


def _is_this_host(name: str) -> bool:
    """Return whether an address of the host `name` belongs to this machine: a socket can be bound to no other address.

    A name without an address belongs to another host, which may not have started yet.
    """
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as listener, contextlib.suppress(OSError):
            listener.bind(address)
            return True
    return False


def rendezvous_settings(cfg: DictConfig, node_rank: int, attempt: int) -> dict[str, Any]:
    """Return the rendezvous settings of torch's elastic launcher for one attempt.

    On several hosts, each attempt uses another port, because the previous one may still be in use. The static backend
    is used because the node ranks are known, and because the c10d backend's launcher hangs when the link is cut.
    """
    if cfg.trainer.num_nodes == 1:  # launch.endpoint may remain from a run on several hosts
        return {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    host, port = _parse_endpoint(cfg.launch.endpoint)
    settings = {"rank": node_rank, "timeout": cfg.launch.rendezvous_timeout}
    return {"rdzv_backend": "static", "rdzv_endpoint": f"{host}:{port + 2 * attempt}", "rdzv_configs": settings}


def _parse_endpoint(endpoint: str | None) -> tuple[str, int]:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    try:
        return parse_rendezvous_endpoint(endpoint, default_port=29500)
    except ValueError as error:
        raise UserError(f"launch.endpoint={endpoint}: give HOST:PORT of one of the hosts ({error})") from None


def check_endpoint(endpoint: str | None, max_restarts: int) -> str:
    """Check that this host can listen on the ports of `launch.endpoint`, or else that it finds the endpoint's host.

    Raises:
        UserError: if the endpoint is missing or invalid, its host is unknown, or a port is not free.
    """
    if not endpoint:
        raise UserError("trainer.num_nodes: several hosts need launch.endpoint=HOST:PORT of one, or torchrun or srun")
    host, port = _parse_endpoint(endpoint)
    ports = [port + 1, *(port + 2 * attempt for attempt in range(max_restarts + 1))]
    if _is_this_host(host):
        for number in ports:
            check_port_is_free(number, "launch.endpoint")
        return f"{', '.join(map(str, sorted(ports)))} of this host are free"
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise UserError(f"launch.endpoint={endpoint}: this host does not find {host} ({error.strerror})") from None
    return f"{', '.join(map(str, sorted(ports)))} of {host} ({address})"
