"""Locks between the processes of one machine that leave no file and end with the process that holds them."""

import hashlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_PAUSE = 0.2  # seconds between two attempts


def try_lock(name: str) -> socket.socket | None:
    """The lock of this name, held until it is closed or the process ends, or None if another has it.

    A socket in Linux's abstract namespace: the kernel lets one process bind a name, and frees it whatever happens.
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
    """Wait until `count` of the named locks are free, and hold them.

    Only one process at a time acquires locks, which prevents a deadlock.
    """
    with ExitStack() as held:
        chosen: list[str] = []
        with hold_lock("gathering"):
            while len(chosen) < count:
                for name in names:
                    if name not in chosen and len(chosen) < count and (lock := try_lock(name)):
                        held.enter_context(lock)
                        chosen.append(name)
                time.sleep(_PAUSE if len(chosen) < count else 0)
        yield sorted(chosen, key=names.index)
