"""Files of a run: their names, locks, files that appear complete or not at all, and lines of JSON that are appended."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from onecurve.errors import UserError

CONFIG, METRICS, CHECKPOINTS = "config.yaml", "metrics.csv", "checkpoints"  # of a run folder
LAST, PREVIOUS = "last.ckpt", "previous.ckpt"  # of `checkpoints`: the latest state, and the one that it replaced
_LOCKS = Path("/tmp")  # the same for all processes of a machine, whatever their TMPDIR


def is_of_test(column: str) -> bool:
    """Return whether a column of metrics.csv is of a test: its rows count all steps, and a second test has its own."""
    return column.startswith("test")


def named_lock(name: str) -> FileLock:
    """Return a lock between the processes of one user on one machine, which ends with the process that holds it.

    It is a context manager that waits for the lock. Its file is empty, and remains.
    """
    return FileLock(_LOCKS / f"train-{os.getuid()}-{hashlib.sha256(name.encode()).hexdigest()}.lock")


@contextmanager
def file_lock(file: Path) -> Iterator[Path]:
    """Create the folder of `file`, and hold the lock for creating the file."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            yield file
    except OSError as error:
        raise UserError(f"cannot write to {file.parent} ({error.strerror}): set data.root to another folder") from None


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield a temporary path; on success, sync it and rename it to `file`. On an exception, remove it."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)  # left by a process that was killed, of the same number, as in containers
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def read_json_lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file in order, without lines that a kill has cut; a missing file has none."""
    if not file.is_file():
        return
    with file.open(errors="replace") as stream:
        for line in stream:
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, dict):
                yield content


def append_json_line(file: Path, content: dict[str, Any]) -> None:
    """Append an object to a file, on a line of its own even if a kill has cut the last one."""
    with file.open("ab+") as stream:
        stream.seek(max(0, stream.tell() - 1))
        is_cut = stream.read(1) not in (b"", b"\n")
        stream.write(b"\n" * is_cut + json.dumps(content).encode() + b"\n")
