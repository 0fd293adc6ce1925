"""Start the real command line, wait for its output, and check that it leaves no process."""

import contextlib
import fcntl
import io
import logging
import os
import pty
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRAIN = ("train.py",)
FORKING = ("-m", "tests.support.fork_server")  # train.py, whose ranks start faster
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
TINY = [  # two epochs of 11 steps on the fixture `small`
    "model=mlp",
    "model.hidden=[16]",
    "data.batch_size=32",
    "trainer.max_epochs=2",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "report=false",
]
PARITY = ["experiment=parity", "logger=none", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
PARITY += ["report=false"]
TWO = ["strategy=ddp", "trainer.devices=2"]
_SLURM = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train"}
_SLURM |= {
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NODELIST": "localhost",
    "SLURM_STEP_ID": "0",
    "MASTER_ADDR": "127.0.0.1",
}


def start(*arguments: str, program: Sequence[str] = TRAIN, **variables: str) -> "subprocess.Popen[str]":
    """Start a command in a process group of its own."""
    environment = {key: value for key, value in os.environ.items() if key != "HYDRA_FULL_ERROR"} | variables
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def run(*arguments: str, code: int = 0, program: Sequence[str] = TRAIN, **variables: str) -> tuple[str, str]:
    """Run a command to its end, and return its output. No process of its group may be left."""
    process = start(*arguments, program=program, **variables)
    try:
        out, err = process.communicate(timeout=400)
    finally:
        left = kill_group(process.pid)
    assert process.returncode == code, err[-3000:]
    assert not left, "processes left running"
    return out, err


def run_in_terminal(*arguments: str, columns: int, typed: str = "") -> tuple[int, str]:
    """Run train.py on a terminal of its own; return the exit code and what it printed, without colors and cursor.

    Args:
        arguments: the overrides.
        columns: the width of the terminal.
        typed: what a user types, which waits until a process reads it.
    """
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, *TRAIN, *arguments])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.write(terminal, typed.encode())
    printed = b""
    with contextlib.suppress(OSError):  # the other end has closed
        while part := os.read(terminal, 65536):
            printed += part
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed.decode(errors="replace"))
    return os.waitstatus_to_exitcode(status), text.replace("\r", "\n")


def run_here(*arguments: str, code: int = 0, program: str = "train.py") -> tuple[str, str]:
    """Run train.py or a module of scripts/ inside this process, and return its output.

    A new process takes seconds to import torch. What ranks print is not part of it.
    """
    out, err = io.StringIO(), io.StringIO()
    with restored(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        os.chdir(ROOT)
        sys.argv = [program, *arguments]
        try:
            if program.endswith(".py"):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                warnings.filterwarnings("ignore", ".*found in sys.modules")  # a test may import it as well
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            result: object = 0
        except SystemExit as stop:
            result = stop.code or 0
    if isinstance(result, str):  # the interpreter prints such a code, and ends with 1
        err.write(f"{result}\n")
        result = 1
    assert result == code, err.getvalue()[-3000:]
    return out.getvalue(), err.getvalue()


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore arguments, working directory, logging and warnings afterwards."""
    root, lightning = logging.getLogger(), logging.getLogger("lightning.pytorch")
    folder, argv, level, handlers = Path.cwd(), sys.argv, root.level, (root.handlers[:], lightning.handlers[:])
    with warnings.catch_warnings():
        try:
            yield
        finally:
            os.chdir(folder)
            sys.argv = argv
            logging.captureWarnings(False)
            for handler in set(root.handlers) - set(handlers[0]):
                handler.close()
            root.setLevel(level)
            root.handlers[:], lightning.handlers[:] = handlers


def wait_for_exit(process: "subprocess.Popen[str]", timeout: float = 300.0) -> tuple[int, str, str]:
    """Return exit code and output; kill the process group of a command that does not end in time."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def kill_group(group: int) -> bool:
    """Kill a process group that outlives its leader for 30 seconds, of which Python's resource tracker takes one.

    Returns:
        Whether a process was left.
    """
    if wait_until(lambda: not subprocess.run(["pgrep", "-g", str(group)], capture_output=True).stdout, 30):
        return False
    os.killpg(group, signal.SIGKILL)
    return True


def wait_until(reached: Callable[[], bool], seconds: float) -> bool:
    """Poll a condition until it holds or the time is up; return whether it holds."""
    deadline = time.monotonic() + seconds
    while not (holds := reached()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds


def error_line(err: str) -> str:
    """Return the error message, which must be a single line besides warnings."""
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    return lines[0]


def count_lines(folder: Path) -> int:
    """Return the number of lines of metrics.csv, header included."""
    file = folder / "metrics.csv"
    return file.read_text().count("\n") if file.exists() else 0


def steps(folder: Path) -> list[int]:
    """Return the steps of the rows of metrics.csv."""
    return [int(row.split(",")[0]) for row in (folder / "metrics.csv").read_text().splitlines()[1:]]


def wait_for_rows(folder: Path, number: int, process: "subprocess.Popen[str]") -> None:
    """Wait until the run has logged more than `number` lines."""
    wait_until(lambda: count_lines(folder) > number or process.poll() is not None, 300)
    assert count_lines(folder) > number, process.communicate(timeout=10)[1][-3000:]


def ranks(launcher: int) -> list[int]:
    """Return the process ids of the ranks in order, without the launcher's resource tracker."""
    found = children(launcher)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in found if Path(f"/proc/{pid}").exists()}
    started = [pid for pid, command in commands.items() if "spawn_main" in command or "train.py" in command]
    for pid in [pid for pid, command in commands.items() if "forkserver" in command]:
        started += children(int(pid))
    return [int(pid) for pid in started]


def children(process: int) -> list[str]:
    """Return the process ids of the children of a process, in their order."""
    return subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True).stdout.split()


def callback(name: str, **options: object) -> str:
    """Return the override that adds a callback of tests/support/callbacks.py under its name in lower case."""
    listed = "".join(f", {option}: {value}" for option, value in options.items())
    return f"+callbacks.{name.lower()}={{_target_: tests.support.callbacks.{name}{listed}}}"


def slow(seconds: float) -> str:
    """Return the override that delays each step by `seconds`."""
    return callback("Slow", seconds=seconds)


def free_port() -> int:
    """Return a free port for a command that binds it itself."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def slurm_task(rank: int, port: int) -> dict[str, str]:
    """Return the variables that srun sets for one of two tasks."""
    return _SLURM | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "MASTER_PORT": str(port)}
