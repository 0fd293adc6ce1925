"""The names of the checkpoints in a run folder, and the line that tells the user how to go on from them."""

from pathlib import Path
from signal import Signals

CHECKPOINTS = "checkpoints"
LAST, PREVIOUS = "last.ckpt", "previous.ckpt"  # the latest state, and the one it replaced


def stop_message(number: int, run_dir: str | Path, place: str = "") -> str:
    """Return the line that says by which signal, and where, a run has stopped, and how to continue it."""
    stopped = f"stopped by {Signals(number).name}{place}"
    if any((Path(run_dir) / CHECKPOINTS).glob("*.ckpt")):
        return f"{stopped}; ckpt_path={run_dir} goes on from its last save"
    return f"{stopped}; {run_dir} has no checkpoint yet"


def checkpoint_file(path: Path) -> Path:
    """Return the absolute path of a checkpoint: the file itself, or last.ckpt of a run folder, complete or not."""
    path = path.expanduser().absolute()
    return path / CHECKPOINTS / LAST if path.is_dir() else path
