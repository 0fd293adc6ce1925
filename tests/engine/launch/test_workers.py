"""What the ranks that this host starts have from their launcher, and from the process of which they are forked."""

import atexit
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning as L
import pytest

from onecurve.process.devices import usable_cores
from onecurve.process.fork_server import PRELOADED, start_fork_server
from onecurve.process.started_by import take_environment
from tests.support.commands import TINY, TWO, run_here
from tests.support.idle_thread import leave_an_idle_thread

IMPORT = """
import importlib, os, sys, torch

def ask_for_device(*_):
    raise AssertionError("a process that has asked for a device cannot be forked")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = ask_for_device
for name in sys.argv[1:]:
    importlib.import_module(name)
threads = len(os.listdir("/proc/self/task"))
assert threads == 1, threads
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
def test_what_ranks_are_forked_from_has_no_device_and_no_threads() -> None:
    subprocess.run([sys.executable, "-c", IMPORT, *PRELOADED], check=True)


START = """
import shutil, sys, tempfile
from pathlib import Path
from onecurve.process import fork_server

fork_server.PRELOADED.clear()
print(fork_server.start_fork_server())
for path in Path(tempfile.gettempdir()).glob("pymp-*"):
    shutil.rmtree(path)
print(fork_server.start_fork_server(), fork_server.start_fork_server())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
@pytest.mark.parametrize(("length", "expected"), [(10, "forkserver"), (90, "spawn")])
def test_without_a_socket_ranks_are_spawned(length: int, expected: str) -> None:
    """The folder for temporary files may have a long path, as on clusters, or be emptied during the run."""
    with TemporaryDirectory(dir="/tmp") as folder:
        temporary = Path(folder, "t" * (length - len(folder)))
        temporary.mkdir(exist_ok=True)
        process = subprocess.run(
            [sys.executable, "-c", START],
            env=os.environ | {"TMPDIR": str(temporary)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert not list(temporary.glob("pymp-*"))
    assert process.stdout.split() == [expected, "spawn", "spawn"]
    assert process.stderr == ""


MINE = """
import sys, time
from pathlib import Path
from onecurve.process import fork_server

sys.path.insert(0, "extra")
fork_server.PRELOADED[:] = ["mine"]
fork_server.start_fork_server()
while not Path("imported").exists():
    time.sleep(0.01)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux only")
def test_ranks_import_from_where_their_launcher_does(tmp_path: Path) -> None:
    """Also by a relative path, though the fork server begins in another folder, and before libraries of that name."""
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "mine.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path)!r}, 'imported').touch()")
    subprocess.run([sys.executable, "-c", MINE], cwd=tmp_path, check=True, timeout=60)


class Marks(L.Callback):
    """Writes the cores that a rank may use into a file that nobody closes, and a file at the end of the process."""

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        folder, rank = Path(trainer.default_root_dir), trainer.global_rank
        self.file = (folder / f"cores{rank}").open("w")
        self.file.write(str(usable_cores()))
        atexit.register((folder / f"end{rank}").touch)


@pytest.mark.skipif(sys.platform != "linux", reason="macOS cannot restrict a process to some cores")
def test_ranks_have_the_present_cores_of_their_launcher(small: list[str], folder: Path) -> None:
    """The fork server of this process began with all of them, as that of an earlier job of a sweep with others."""
    start_fork_server()
    before = usable_cores()
    os.sched_setaffinity(0, before[:1])
    try:
        marks = f"+callbacks.marks._target_={__name__}.Marks"
        short = [*TINY, *TWO, "logger=none", "trainer.max_steps=1", "test=false"]
        run_here(*small, *short, marks, f"run_dir={folder}")
    finally:
        os.sched_setaffinity(0, before)
    assert [(folder / f"cores{rank}").read_text() for rank in (0, 1)] == [str(before[:1])] * 2, "written at the end"
    assert [(folder / f"end{rank}").exists() for rank in (0, 1)] == [True, True]


def test_a_rank_ends_with_an_idle_pool_of_threads() -> None:
    """As torch.compile has one."""
    process = multiprocessing.get_context("spawn").Process(target=leave_an_idle_thread)
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 0


def test_a_rank_has_the_present_variables_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"RANK": "1", "TORCHELASTIC_RUN_ID": "run", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    before = {"OLD": "of an earlier job", "FLAG": "before", "LOCAL_DATA": "/before"}
    environment: dict[str, str] = {**before, **own}
    monkeypatch.setattr("os.environ", environment)
    take_environment({"FLAG": "now", "NEW": "of this job"})
    assert environment == {"FLAG": "now", "NEW": "of this job", **own}
