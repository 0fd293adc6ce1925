"""What the ranks that this host starts have from their launcher, and from the process of which they are forked."""

import subprocess
import sys

import pytest

from onecurve.process.fork_server import PRELOADED
from onecurve.process.launcher import take_environment

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


def test_a_rank_has_the_present_variables_of_its_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"RANK": "1", "TORCHELASTIC_RUN_ID": "run", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    before = {"OLD": "of an earlier job", "FLAG": "before", "LOCAL_DATA": "/before"}
    environment: dict[str, str] = {**before, **own}
    monkeypatch.setattr("os.environ", environment)
    take_environment({"FLAG": "now", "NEW": "of this job"})
    assert environment == {"FLAG": "now", "NEW": "of this job", **own}
