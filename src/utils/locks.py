"""Locks between the processes of one machine. They leave no file, and end with the process that holds them."""

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_PAUSE = 0.2  # seconds between two attempts


def try_lock(name: str) -> socket.socket | None:
    """Return the lock of this name, or None if another process holds it.

    It is held until it is closed or the process ends. It is a socket in Linux's abstract namespace: the kernel lets
    only one process bind a name, and frees the name however that process ends.
    """
    lock = socket.socket(socket.AF_UNIX)
    try:
        lock.bind(f"\0train-{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()}")
    except OSError:
        lock.close()
        return None
    return lock


@contextmanager
def hold_lock(name: str) -> Iterator[None]:
    """Wait for the lock of this name, and hold it."""
    while (lock := try_lock(name)) is None:
        time.sleep(_PAUSE)
    with lock:
        yield


@contextmanager
def acquire_locks(names: list[str], count: int) -> Iterator[list[str]]:
    """Wait until `count` of the named locks are free, hold them, and yield their names.

    Only one process at a time acquires locks, which prevents a deadlock.
    """
    with ExitStack() as stack:
        acquired: list[str] = []
        with hold_lock("gathering"):
            while len(acquired) < count:
                for name in names:
                    if name not in acquired and len(acquired) < count and (lock := try_lock(name)):
                        stack.enter_context(lock)
                        acquired.append(name)
                if len(acquired) < count:
                    time.sleep(_PAUSE)
        yield sorted(acquired, key=names.index)
