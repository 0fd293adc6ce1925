"""Checkpoint files: complete or absent, and readable without running code."""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor
from torch.utils._pytree import tree_map_only

from src.engine.state import sharded
from src.engine.state.integrity import read_checkpoint
from src.engine.state.run_files import LAST, PREVIOUS
from src.engine.utils.errors import UserError
from src.engine.utils.files import atomic_write
from src.engine.utils.tensors import with_versions

_log = logging.getLogger(__name__)
_HYPER_PARAMETERS, _TYPE = "hyper_parameters", "hparams_type"  # keys of Lightning's checkpoints


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name, syncs it and renames it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        """Write the file, with tensors of the CPU only, so that plain `torch.load` opens it on a machine without GPUs.

        Raises:
            UserError: if the disk is full or not writable; an existing file does not change.
        """
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(file) as temporary:
                with temporary.open("wb") as stream:
                    torch.save(_to_cpu(_without_objects(checkpoint)), stream)
                if file.name == LAST and file.exists():
                    _link_or_copy(file, file.with_name(PREVIOUS))
            sharded.remove_unused_folders(file)  # also those of an earlier start under another strategy
        except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError for some OSErrors
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise write_error(file, cause) from error

    def load_checkpoint(self, path: _PATH, map_location: Any = "cpu", weights_only: Any = True) -> dict[str, Any]:
        """Read the file; it may contain only tensors and plain containers."""
        return read_checkpoint(path, map_location=map_location)

    def remove_checkpoint(self, path: _PATH) -> None:
        super().remove_checkpoint(path)
        sharded.remove_unused_folders(Path(path))


def _without_objects(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with those hyper-parameters of a module only that can be read without running code."""
    kept = {key: value for key, value in checkpoint.items() if key != _TYPE}
    if _HYPER_PARAMETERS in kept:
        kept[_HYPER_PARAMETERS] = {key: value for key, value in kept[_HYPER_PARAMETERS].items() if _is_plain(value)}
    return kept


def _is_plain(value: Any) -> bool:
    """Return whether torch.load reads a value with weights_only=True."""
    if type(value) is dict:
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (str, bytes, bool, int, float, Tensor)


def _to_cpu(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint with tensors in CPU memory, but for the meta tensors of a sharded one."""
    copies: dict[Any, Tensor] = {}  # tied weights are different tensors with the same memory

    def copy(tensor: Tensor) -> Tensor:
        if tensor.is_cpu or tensor.is_meta:
            return tensor
        key = (tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            copies[key] = tensor.cpu()
        return copies[key]

    copied = tree_map_only(Tensor, copy, checkpoint)
    return copied | {
        section: with_versions(copied[section], checkpoint[section])
        for section in sharded.WEIGHTS
        if section in checkpoint
    }


def write_error(file: Path, cause: OSError) -> UserError:
    """Return the error for a checkpoint that cannot be written."""
    return UserError(
        f"cannot write the checkpoint {file} ({cause}): free some space, then continue with "
        f"ckpt_path={file.parent.parent}; the existing checkpoints are complete"
    )


def _link_or_copy(file: Path, name: Path) -> None:
    """Give the file a second name, under which it remains when `file` is replaced."""
    with atomic_write(name) as temporary:
        try:
            os.link(file, temporary)
        except OSError:  # some file systems have no hard links
            shutil.copyfile(file, temporary)
