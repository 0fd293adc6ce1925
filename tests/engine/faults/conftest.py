"""Check that no test of this folder leaves a process or shared memory."""

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.commands import children

_MARK = "STARTED_BY_TEST"
_SHARED = Path("/dev/shm")
_OURS = ("torch_", "sem.", "psm_")  # prefixes of torch and multiprocessing
_TIMEOUT = 60.0  # seconds in which Python's resource tracker and wandb's service notice that they are alone


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Mark the processes of a test by an environment variable, which they inherit, and look for it afterwards."""
    mark, before = uuid4().hex, set(os.listdir(_SHARED))
    os.environ[_MARK] = mark
    yield
    del os.environ[_MARK]
    gc.collect()  # a launcher inside this process leaves its semaphores in cycles
    deadline = time.monotonic() + _TIMEOUT
    while (left := _processes(mark) + _segments(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _processes(mark: str) -> list[str]:
    """Return the command lines of processes that carry the mark, except the pool's ranks, which live on.

    The children of the fork server have its environment.
    """
    ours = {str(child.pid) for child in multiprocessing.active_children()}
    ours |= {str(resource_tracker._resource_tracker._pid), str(forkserver._forkserver._forkserver_pid)}
    started = [folder for folder in Path("/proc").glob("[0-9]*") if f"{_MARK}={mark}" in _text(folder / "environ")]
    server = forkserver._forkserver._forkserver_pid
    started += [Path("/proc", child) for child in (children(server) if server else [])]
    return [_text(folder / "cmdline").replace("\0", " ") for folder in started if folder.name not in ours]


def _segments(before: set[str]) -> list[str]:
    """Return new names in shared memory; none if other programs use some, since a name has no owner."""
    ours = str(resource_tracker._resource_tracker._pid)
    others = [folder for folder in Path("/proc").glob("[0-9]*") if "resource_tracker" in _text(folder / "cmdline")]
    new = {name for name in set(os.listdir(_SHARED)) - before if name.startswith(_OURS)}
    return sorted(new) if all(folder.name == ours for folder in others) else []


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:  # the process has ended, or belongs to another user
        return ""
