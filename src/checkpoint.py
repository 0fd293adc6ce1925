"""Checkpoint files: complete or absent, and readable without running code."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO

from src.errors import UserError
from src.files import replacing


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name, syncs it and renames it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write the file.

        Raises:
            UserError: if the disk is full or cannot be written to; a file that was there stays as it was.
        """
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as temporary, temporary.open("wb") as stream:
                torch.save(checkpoint, stream)
        except (OSError, RuntimeError) as error:  # torch's zip writer turns some of the former into the latter
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise UserError(
                f"cannot write the checkpoint {file} ({cause}): free some space, then continue with "
                f"ckpt_path={file.parent.parent}; the checkpoints that are there are whole"
            ) from error

    def load_checkpoint(self, path: _PATH, map_location: Any = "cpu", weights_only: Any = True) -> dict[str, Any]:
        """Read the file, tensors and plain containers only.

        Raises:
            UserError: if it is no checkpoint, or not a whole one.
        """
        return _read(path, map_location=map_location)


def check_is_checkpoint(path: Path) -> None:
    """Find out, without reading the tensors, whether a run can be continued from `path`.

    Raises:
        UserError: if not.
    """
    if "state_dict" not in _read(path, map_location="meta", mmap=True):
        raise UserError(f"ckpt_path={path} is no checkpoint of a training run: it has no `state_dict`")


def _read(path: _PATH, **options: Any) -> dict[str, Any]:
    try:
        return torch.load(path, weights_only=True, **options)
    except Exception as error:  # a damaged file can raise anything
        cause = str(error).split("\n")[0]
        raise UserError(f"ckpt_path={path} is no whole checkpoint ({cause}): take another") from error
