"""Sharded checkpoints of large networks: a small file, and beside it a folder into which every rank writes its shards.

The file is a checkpoint like any other, but its tensors are meta tensors, without memory. Its key `shards` names the
folder, which has the format of torch.distributed.checkpoint. A new folder is written before the file is replaced, and
the old folder is removed after that, so that the file's folder is complete at any moment.
"""

import glob
import secrets
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from onecurve.checkpoint.format import BY_WEIGHT, MERGED
from onecurve.checkpoint.optimizer_state import indices_by_name
from onecurve.network.tensors import with_versions
from onecurve.patches.torch import tree_map_only

SHARDS = "shards"
_WEIGHTS = [key for key, kind in MERGED.items() if kind == BY_WEIGHT]


def new_folder(file: Path) -> Path:
    """Return a new name for the folder of the tensors of the checkpoint `file`."""
    return file.with_name(f"{file.stem}.{secrets.token_hex(4)}.{SHARDS}")


def save_shards(checkpoint: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the tensors of a checkpoint, each rank its own; return what the file has. Every rank must call it."""
    try:
        dcp.save(_tensors_by_name(checkpoint), checkpoint_id=folder, no_dist=not dist.is_initialized())
    except dcp.CheckpointException as error:
        raise _rank_error(error) from error
    shapes = map_tensors(checkpoint, lambda full: torch.empty(full.shape, dtype=full.dtype, device="meta"))
    return shapes | {SHARDS: folder.name}


def load_full(checkpoint: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return the checkpoint with full tensors, read from its folder if it is sharded. Each rank can call it alone."""
    if not isinstance(checkpoint, dict) or SHARDS not in checkpoint:  # a file may contain any object
        return checkpoint
    folder = file.parent / checkpoint[SHARDS]
    if not (folder / ".metadata").is_file():
        raise FileNotFoundError(f"its folder {folder.name} does not exist")
    full = map_tensors(checkpoint, lambda tensor: torch.empty_like(tensor, device="cpu"))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # reading needs no process group
            dcp.load(_tensors_by_name(full), checkpoint_id=folder, no_dist=True)
    except dcp.CheckpointException as error:
        raise _rank_error(error) from error
    return full


def _rank_error(error: dcp.CheckpointException) -> Exception:
    """Return the first OSError of a rank, or the text of the first error if there is none.

    CheckpointException is a BaseException and hides the errors of the ranks.
    """
    raised = [failure for failure, _ in error.failures.values()]
    causes = [cause for failure in raised for cause in (failure, failure.__cause__, failure.__context__)]
    return next((cause for cause in causes if isinstance(cause, OSError)), RuntimeError(str(raised[0])))


def check_shards(checkpoint: dict[str, Any], file: Path) -> None:
    """Raise a FileNotFoundError if the folder of a sharded checkpoint lacks tensors; they are not read."""
    if SHARDS in checkpoint:
        folder = file.parent / checkpoint[SHARDS]
        for stored in dcp.FileSystemReader(folder).read_metadata().storage_data.values():
            size = (folder / stored.relative_path).stat().st_size
            if size < stored.offset + stored.length:
                raise FileNotFoundError(f"{folder.name}/{stored.relative_path} is truncated")


def remove_unused_folders(file: Path) -> None:
    """Remove the present and former folders of `file` that no checkpoint in the same directory uses."""
    folders = list(file.parent.glob(f"{glob.escape(file.stem)}.{'[0-9a-f]' * 8}.{SHARDS}"))
    if not folders:  # reading the checkpoints takes time
        return
    try:
        used = [_pickle_of(one) for one in {file, *file.parent.glob("*.ckpt")} if one.is_file()]
    except OSError:  # of a file system that does not answer: the next save looks again
        return
    for folder in folders:
        if not any(folder.name.encode() in each for each in used):
            shutil.rmtree(folder, ignore_errors=True)  # another process may be reading it


def _pickle_of(file: Path) -> bytes:
    """Return the pickle in a checkpoint, whose text names the folder; nothing of a corrupt file.

    It is not loaded: the user may have put objects into the checkpoint, which `torch.load` refuses.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    except OSError:
        raise
    except Exception:  # a corrupt file can raise anything
        return b""


def map_tensors(checkpoint: dict[str, Any], function: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Return the checkpoint with `function(tensor)` in place of each tensor of weights and optimizers."""
    mapped = dict(checkpoint)
    for section in _WEIGHTS:
        if section in checkpoint:
            tensors = tree_map_only(Tensor, function, dict(checkpoint[section]))
            mapped[section] = with_versions(tensors, checkpoint[section])
    if "optimizer_states" in checkpoint:
        mapped["optimizer_states"] = [
            state | {"state": tree_map_only(Tensor, function, state["state"])}
            for state in checkpoint["optimizer_states"]
        ]
    return mapped


def _tensors_by_name(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of weights and optimizers by names that are the same on every rank.

    The name of a moment contains that of its parameter, whose index differs between ranks.
    """
    values = {f"{section}.{name}": value for section in _WEIGHTS for name, value in checkpoint.get(section, {}).items()}
    for number, state in enumerate(checkpoint.get("optimizer_states", [])):
        for name, index in indices_by_name(state).items():
            moments = state["state"].get(index, {})
            values |= {f"optimizer_states.{number}.{name}.{key}": value for key, value in moments.items()}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}
