"""Two ranks that share one device: torchrun starts them as two hosts with one device each.

NCCL refuses two ranks of one host on one GPU. It takes ranks with different NCCL_HOSTID for those of different hosts
(`getHostHash` in its src/misc/utils.cc), and then connects them by sockets.
"""

import socket
import sys
from collections.abc import Callable
from dataclasses import replace

from engine.dev.gpu_check.case import Session, expect
from engine.dev.gpu_check.runs import SHORT_PARITY, expect_equal, overrides, run
from engine.dev.gpu_check.strategies import groups_of
from engine.dev.shared.process import Command, python, run_together
from onecurve.run.result import Result

_HOSTS = 2
_LIMIT = 90  # seconds of a run
_LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_DEBUG": "WARN"}
_END_OF_LOG = 3000  # characters


def shared_check(strategy: str) -> Callable[[Session], str]:
    """Return the check that two ranks on one device agree in float64 with one process on the CPU."""

    def check(session: Session) -> str:
        options = [*SHORT_PARITY, groups_of(strategy)]
        expected = run(replace(session, accelerator="cpu"), "cpu", *options)
        found = run_on_two_hosts(session, "float64", *options, f"strategy={strategy}")
        return f"difference {expect_equal(found, expected)} in float64, two ranks on one device"

    return check


def run_on_two_hosts(session: Session, name: str, *own: str) -> Result:
    """Train on synthetic shapes with two ranks on one device; both must end without an error."""
    words = overrides(session, name, *own, f"trainer.num_nodes={_HOSTS}")
    port = _free_port()
    commands = [
        Command(
            [*_torchrun(host, port), "train.py", *words],
            session.folder / f"{name}-host{host}.log",
            {**_LOOPBACK, "NCCL_HOSTID": f"host{host}"},
        )
        for host in range(_HOSTS)
    ]
    codes = run_together(commands, _LIMIT)
    if any(codes) or None in codes:
        for command in commands:
            print(f"{command.log.name}:\n{command.log.read_text(errors='replace')[-_END_OF_LOG:]}", file=sys.stderr)
    expect(codes == [0] * _HOSTS, f"{name}: the hosts ended with {codes}; None is one that was ended")
    return Result({}, session.folder / name)


def _torchrun(host: int, port: int) -> list[str]:
    meeting = ["--master-addr=127.0.0.1", f"--master-port={port}"]
    return python(
        "-m", "torch.distributed.run", f"--nnodes={_HOSTS}", f"--node-rank={host}", "--nproc-per-node=1", *meeting
    )


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
