"""Files that appear whole or not at all, made by one process while the others wait."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from src.utils.errors import UserError


@contextmanager
def locked(file: Path) -> Iterator[Path]:
    """Hold the lock that guards the making of `file`; its folder is made if need be."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            yield file
    except OSError as error:
        raise UserError(f"cannot write to {file.parent} ({error.strerror}): set data.root to another folder") from None


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Give a temporary name beside `file`; what was written there is synced and renamed to `file` at the end.

    If the block raises, what it wrote is removed and `file` stays as it was.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
