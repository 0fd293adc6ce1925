"""The names of the checkpoints in a run folder."""

from pathlib import Path

CHECKPOINTS = "checkpoints"
LAST, PREVIOUS = "last.ckpt", "previous.ckpt"  # the latest state, and the one it replaced


def checkpoint_file(path: Path) -> Path:
    """Return the absolute path of a checkpoint: the latest one of a run folder, or the file itself."""
    path = path.expanduser().absolute()
    return path / CHECKPOINTS / LAST if path.is_dir() else path
