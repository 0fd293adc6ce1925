"""Find the checkpoint of a run folder that a run continues, and remove what a killed save has left beside it."""

import sys
from pathlib import Path

from onecurve.checkpoint.run_files import CHECKPOINTS, LAST, PREVIOUS
from onecurve.errors import UserError


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
