"""Two hosts on one machine: network namespaces joined by a veth pair, each with its own name and address."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


class Hosts:
    """A pair of hosts and the link between them."""

    def __init__(self, folder: Path) -> None:
        tag = f"{os.getpid() % 100_000}"
        self.names = [f"a{tag}", f"b{tag}"]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self._file = folder / "hosts"
        lines = [f"{address} {name}" for address, name in zip(self.addresses, self.names, strict=True)]
        self._file.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")

    def set_up(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        ends = [f"v{name}" for name in self.names]
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(self.names, ends, self.addresses, strict=True):
            _ip("link", "set", end, "netns", name, "name", "eth0")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def tear_down(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def link(self, state: str) -> None:
        """Set the first host's end of the link `up` or `down`."""
        _ip("-n", self.names[0], "link", "set", "eth0", state)

    def start(self, host: int, command: Sequence[str], log: Path, cwd: Path) -> subprocess.Popen[bytes]:
        """Start a command on one host, with its output in `log`."""
        name = self.names[host]
        enter = ["nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "--mount"]
        inside = ["bash", "-c", _ENTER, "_", name, str(self._file), *command]
        variables = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0"}
        with log.open("wb") as stream:
            return subprocess.Popen([*enter, *inside], stdout=stream, stderr=stream, cwd=cwd, env=variables)


def skip_reason() -> str | None:
    """Return why this machine cannot create network namespaces, or None if it can."""
    if missing := [tool for tool in ("ip", "nsenter", "unshare") if not shutil.which(tool)]:
        return f"there is no {missing[0]} to make network namespaces with"
    probe = f"probe{os.getpid() % 100_000}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode:
        return "this user may not make network namespaces"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
