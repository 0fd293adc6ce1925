"""The checkpoints in a run folder: their names, and which one a run continues."""

import sys
from pathlib import Path
from signal import Signals

from onecurve.errors import UserError

CHECKPOINTS = "checkpoints"
LAST, PREVIOUS = "last.ckpt", "previous.ckpt"  # the latest state, and the one it replaced


def stop_message(number: int, run_dir: str | Path, place: str = "") -> str:
    """Return the line that says by which signal, and where, a run has stopped, and how to continue it."""
    stopped = f"stopped by {Signals(number).name}{place}"
    if any((Path(run_dir) / CHECKPOINTS).glob("*.ckpt")):
        return f"{stopped}; ckpt_path={run_dir} goes on from its last save"
    return f"{stopped}; {run_dir} has no checkpoint yet"


def checkpoint_file(path: Path) -> Path:
    """Return the absolute path of a checkpoint: the latest one of a run folder, or the file itself."""
    path = path.expanduser().absolute()
    return path / CHECKPOINTS / LAST if path.is_dir() else path


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a run folder, if any; warn of each corrupt one."""
    for file in sorted((folder / CHECKPOINTS).glob("*.ckpt"), key=_recency_key):
        from onecurve.checkpoint.io import check_is_complete  # late, since it imports Lightning

        try:
            check_is_complete(file)
            return file
        except UserError as error:
            print(f"warning: {error}; looking for the one before it", file=sys.stderr)
    return None


def _recency_key(file: Path) -> tuple[bool, bool, int]:
    """Return the sort key that puts the newest checkpoint first.

    The names come before the modification time, because copying a folder may reset the time.
    """
    return file.name != LAST, file.name != PREVIOUS, -file.stat().st_mtime_ns


def remove_partial_checkpoints(folder: Path) -> None:
    """Delete the temporary files of a save that was killed. No process may be saving a checkpoint meanwhile."""
    for file in (folder / CHECKPOINTS).glob(".*.part"):
        file.unlink(missing_ok=True)
