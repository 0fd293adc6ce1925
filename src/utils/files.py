"""Files that appear complete or not at all, written by one process while the others wait."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from src.utils.errors import UserError


@contextmanager
def file_lock(file: Path) -> Iterator[Path]:
    """Create the folder of `file`, and hold the lock for creating the file.

    Raises:
        UserError: if the folder is not writable.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            yield file
    except OSError as error:
        raise UserError(f"cannot write to {file.parent} ({error.strerror}): set data.root to another folder") from None


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield a temporary path; on success, sync it and rename it to `file`.

    On an exception, remove it and leave `file`.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
