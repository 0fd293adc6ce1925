"""After every test of this folder no process and no shared memory is left."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from uuid import uuid4

import pytest

_MARK = "STARTED_BY_TEST"
_SHARED = Path("/dev/shm")
_OURS = ("torch_", "sem.", "psm_")  # by torch and by multiprocessing
_PATIENCE = 8.0  # seconds for Python's resource tracker and wandb's service to see that they are alone


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Mark every process that the test starts by a variable, which they inherit, and look for it afterwards."""
    mark, before = uuid4().hex, set(os.listdir(_SHARED))
    os.environ[_MARK] = mark
    yield
    del os.environ[_MARK]
    deadline = time.monotonic() + _PATIENCE
    while (left := _processes(mark) + _segments(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _processes(mark: str) -> list[str]:
    """The command lines of processes that carry the mark; the pool's ranks live on, as they are meant to."""
    ours = {str(child.pid) for child in multiprocessing.active_children()}
    ours |= {str(resource_tracker._resource_tracker._pid)}
    marked = [folder for folder in Path("/proc").glob("[0-9]*") if f"{_MARK}={mark}" in _text(folder / "environ")]
    return [_text(folder / "cmdline").replace("\0", " ") for folder in marked if folder.name not in ours]


def _segments(before: set[str]) -> list[str]:
    """New names in shared memory, unless programs beside this one use some: a name does not tell whose it is."""
    ours = str(resource_tracker._resource_tracker._pid)
    others = [folder for folder in Path("/proc").glob("[0-9]*") if "resource_tracker" in _text(folder / "cmdline")]
    new = {name for name in set(os.listdir(_SHARED)) - before if name.startswith(_OURS)}
    return sorted(new) if all(folder.name == ours for folder in others) else []


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:  # it has ended, or is another user's
        return ""
