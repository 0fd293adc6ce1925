"""The checkpoint from which a run folder goes on."""

import sys
from pathlib import Path

from onecurve.errors import UserError
from onecurve.records.files import CHECKPOINTS, LAST, PREVIOUS


def newest_checkpoint(folder: Path, weights_only: bool = True) -> Path | None:
    """Return the newest complete checkpoint in a run folder, if any; warn of each corrupt one.

    The names come before the modification time, because copying a folder may reset the time. A later file of more steps
    is one that a ModelCheckpoint has saved within an epoch.
    """
    files = (folder / CHECKPOINTS).glob("*.ckpt")
    times = {file: file.stat().st_mtime_ns for file in files}
    newest, newest_steps = None, -1
    for file in sorted(times, key=lambda file: (file.name != LAST, file.name != PREVIOUS, -times[file])):
        from onecurve.checkpoint.io import check_is_complete  # late, since it imports Lightning

        if newest and newest_steps >= 0 and times[file] <= times[newest]:
            continue
        try:
            steps = check_is_complete(file, weights_only)
        except UserError as error:
            print(f"warning: {error}; looking for the one before it", file=sys.stderr)
            continue
        if newest is None or steps > newest_steps:
            newest, newest_steps = file, steps
    return newest


def checkpoint_file(path: Path) -> Path:
    """Return the absolute path of a checkpoint: the file itself, or last.ckpt of a run folder, complete or not."""
    path = path.expanduser().absolute()
    return path / CHECKPOINTS / LAST if path.is_dir() else path
