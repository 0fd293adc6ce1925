"""The names of the checkpoints in a run folder."""

from pathlib import Path

CHECKPOINTS = "checkpoints"


LAST, PREVIOUS = "last.ckpt", "previous.ckpt"  # the latest state, and the one it replaced


def checkpoint_file(given: Path) -> Path:
    """The checkpoint that a run folder, or a file's own name, stands for."""
    given = given.expanduser().absolute()
    return given / CHECKPOINTS / LAST if given.is_dir() else given
