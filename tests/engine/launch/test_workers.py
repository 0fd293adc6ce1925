"""What the ranks that this host starts have from their launcher, and from the process of which they are forked."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from onecurve.process.fork_server import PRELOADED, start_fork_server
from onecurve.process.launcher import take_environment
from onecurve.process.rank import usable_cores
from tests.support.commands import TINY, run_here

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


class Cores(L.Callback):
    """Writes the cores that a rank may use."""

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        Path(trainer.default_root_dir, f"cores{trainer.global_rank}").write_text(str(usable_cores()))


@pytest.mark.skipif(sys.platform != "linux", reason="macOS cannot restrict a process to some cores")
def test_ranks_have_the_present_cores_of_their_launcher(small: list[str], folder: Path) -> None:
    """The fork server of this process began with all of them, as that of an earlier job of a sweep with others."""
    start_fork_server()
    before = usable_cores()
    os.sched_setaffinity(0, before[:1])
    try:
        cores = f"+callbacks.cores._target_={__name__}.Cores"
        run_here(*small, *TINY, "logger=none", "strategy=ddp", "trainer.devices=2", cores, f"run_dir={folder}")
    finally:
        os.sched_setaffinity(0, before)
    assert [(folder / f"cores{rank}").read_text() for rank in (0, 1)] == [str(before[:1])] * 2


def test_a_rank_has_the_present_variables_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"RANK": "1", "TORCHELASTIC_RUN_ID": "run", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    before = {"OLD": "of an earlier job", "FLAG": "before", "LOCAL_DATA": "/before"}
    environment: dict[str, str] = {**before, **own}
    monkeypatch.setattr("os.environ", environment)
    take_environment({"FLAG": "now", "NEW": "of this job"})
    assert environment == {"FLAG": "now", "NEW": "of this job", **own}
