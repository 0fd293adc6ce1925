"""Locks between the processes of one user on one machine. They end with the process that holds them."""

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_PAUSE = 0.2  # seconds between two attempts
_FOLDER = Path("/tmp")  # the same for all processes of a machine, whatever their TMPDIR


def named_lock(name: str) -> FileLock:
    """Return the lock of this name, as a context manager that waits for it. Its file is empty, and remains."""
    return FileLock(_FOLDER / f"train-{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()}.lock")


@contextmanager
def acquire_locks(names: list[str], count: int) -> Iterator[list[str]]:
    """Wait until `count` of the named locks are free, hold them, and yield their names.

    Only one process at a time acquires locks, which prevents a deadlock.
    """
    acquired: list[str] = []
    with ExitStack() as stack:
        with named_lock("gathering"):
            while len(acquired) < count:
                for name in names:
                    if name not in acquired and len(acquired) < count and _try_acquire(lock := named_lock(name)):
                        stack.callback(lock.release)
                        acquired.append(name)
                if len(acquired) < count:
                    time.sleep(_PAUSE)
        yield sorted(acquired, key=names.index)


def _try_acquire(lock: FileLock) -> bool:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return False
    return True
