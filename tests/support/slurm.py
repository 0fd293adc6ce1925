"""A real SLURM of two nodes on this machine, for the user who runs the tests."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmctldPort={port}
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1,requeue_delay=1
JobRequeue=1
KillWait=10
{nodes}
PartitionName=debug Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES:4
"""
_NODE = "NodeName=node{n} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000 State=UNKNOWN"
_PATH = f"{os.environ['PATH']}:/usr/sbin"  # the daemons' folder


class Slurm:
    """The daemons of a SLURM cluster and the commands that talk to them."""

    def __init__(self, folder: Path) -> None:
        host, port = socket.gethostname(), 16_000 + os.getpid() % 1000 * 3
        self.file = folder / "slurm.conf"
        nodes = "\n".join(_NODE.format(n=n, host=host, port=port + n) for n in (1, 2))
        text = _CONFIG.format(host=host, user=getpass.getuser(), port=port, folder=folder, nodes=nodes)
        self.file.write_text(text)
        (folder / "state").mkdir()
        # Node names do not resolve here; both nodes are this host.
        local = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "SLURM_CONF": str(self.file), "PATH": _PATH}
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | local

    def set_up(self) -> None:
        for daemon in (["slurmctld", "-c"], ["slurmd", "-N", "node1"], ["slurmd", "-N", "node2"]):
            self.run(*daemon)
        self.wait_until(lambda: self.run("sinfo", "-h", "-o", "%t").split() == ["idle"], 60, "nodes that are idle")

    def tear_down(self) -> None:
        self.run("scancel", "--user", getpass.getuser())
        for file in self.file.parent.glob("slurm*.pid"):  # `scontrol shutdown` misses a slurmd that has just started
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGTERM)

    def run(self, *command: str) -> str:
        """Run a SLURM command; return its output."""
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def job_state(self, job: str) -> str:
        """Return a job's state, such as RUNNING, PENDING or COMPLETED."""
        shown = self.run("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def wait_until(self, reached: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait for a condition.

        Raises:
            TimeoutError: if it does not hold in time.
        """
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} in {seconds} seconds")
            time.sleep(0.3)


def skip_reason() -> str | None:
    """Return why this machine cannot run SLURM, or None if it can."""
    missing = [name for name in ("slurmctld", "slurmd", "srun") if not shutil.which(name, path=_PATH)]
    return f"SLURM is not installed: there is no {missing[0]}" if missing else None
