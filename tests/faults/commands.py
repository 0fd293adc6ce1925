"""Runs by the real command line that are disturbed from outside, and compared with one that was not."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import torch

from tests.launch.test_command_line import start as start
from tests.runs import relative

TASK = ["experiment=parity", "logger=none", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
TWO = ["strategy=ddp", "trainer.devices=2"]
TRAIN = ("train.py",)
SLURM = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train"}
SLURM |= {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1"}


def task_of(rank: int, port: int) -> dict[str, str]:
    """The variables by which srun tells one of two tasks what it is."""
    return SLURM | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_PORT": str(port)}


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def rows(folder: Path) -> int:
    """Lines of metrics.csv."""
    file = folder / "metrics.csv"
    return file.read_text().count("\n") if file.exists() else 0


def wait_for_rows(folder: Path, number: int, process: "subprocess.Popen[str]") -> None:
    """Wait until the run has logged so many steps."""
    deadline = time.monotonic() + 120
    while rows(folder) <= number and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    assert rows(folder) > number, process.communicate(timeout=10)[1][-3000:]


def ranks(launcher: int) -> list[int]:
    """The processes of the ranks, in their order: among the launcher's children there is the resource tracker too."""
    children = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True).stdout.split()
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in children if Path(f"/proc/{pid}").exists()}
    return [int(pid) for pid, command in commands.items() if "spawn_main" in command or "train.py" in command]


def end(process: "subprocess.Popen[str]", timeout: float = 90.0) -> tuple[int, str, str]:
    """The exit code and what was printed; what does not end in time is killed with all its processes."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def slow(seconds: float) -> str:
    """The override that makes each step last so long."""
    return f"+callbacks.slow={{_target_: tests.faults.misbehaving.Slow, seconds: {seconds}}}"


def same_weights(folder: Path, other: Path) -> None:
    """The last checkpoints of two runs hold the same weights, relative to 1e-9."""
    ours, theirs = (torch.load(place / "checkpoints" / "last.ckpt") for place in (folder, other))
    assert ours["global_step"] == theirs["global_step"]
    assert max(relative(ours["state_dict"][name], tensor) for name, tensor in theirs["state_dict"].items()) < 1e-9
