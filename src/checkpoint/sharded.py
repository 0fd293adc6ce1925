"""Checkpoints of large networks: a small file, and beside it a folder into which every rank writes what it holds.

The file is a checkpoint like any other, but its tensors have no memory (`meta`), and its key `shards` names the
folder, which is torch.distributed.checkpoint's. A new folder is written before the file is replaced, and the one it
replaces is removed after that, so that at any moment the file's folder is complete.
"""

import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

SHARDS = "shards"
WEIGHTS = ("state_dict", "training_state_dict")


def new_folder(file: Path) -> Path:
    """A folder for the tensors of the checkpoint that will be `file`."""
    return file.with_name(f"{file.stem}.{secrets.token_hex(4)}.{SHARDS}")


def save_shards(checkpoint: dict[str, Any], folder: Path) -> None:
    """Write the tensors; each rank writes those it owns. Every rank must call it."""
    try:
        dcp.save(named_tensors(checkpoint), checkpoint_id=folder, no_dist=not dist.is_initialized())
    except dcp.CheckpointException as error:
        raise _rank_error(error) from error


def load_full(checkpoint: dict[str, Any], file: Path, moments: bool = True) -> dict[str, Any]:
    """The checkpoint with whole tensors, if those of `file` lie in a folder; a rank reads them for itself.

    Args:
        moments: also the optimizers' state.

    Raises:
        FileNotFoundError: if the folder is not there.
    """
    if not isinstance(checkpoint, dict) or SHARDS not in checkpoint:  # a file may hold anything
        return checkpoint
    wanted = {name: checkpoint[name] for name in WEIGHTS if name in checkpoint}
    if moments and "optimizer_states" in checkpoint:
        wanted["optimizer_states"] = checkpoint["optimizer_states"]
    full = map_tensors(wanted, lambda _, tensor: torch.empty_like(tensor, device="cpu"))
    load_shards(full, file, checkpoint)
    return checkpoint | full


def load_shards(wanted: dict[str, Any], file: Path, checkpoint: dict[str, Any]) -> None:
    """Read the parts of `wanted`, whole or sharded, in place, from the folder of the checkpoint in `file`."""
    folder = file.parent / checkpoint[SHARDS]
    if not (folder / ".metadata").is_file():
        raise FileNotFoundError(f"its folder {folder.name} is not there")
    try:
        dcp.load(named_tensors(wanted), checkpoint_id=folder, no_dist=True)
    except dcp.CheckpointException as error:
        raise _rank_error(error) from error


def _rank_error(error: dcp.CheckpointException) -> Exception:
    """Return the error of a rank, preferably an OSError.

    (CheckpointException is a BaseException and hides the cause.)
    """
    raised = [cause for cause, _ in error.failures.values()]
    causes = [cause for one in raised for cause in (one, one.__cause__, one.__context__)]
    found = next((cause for cause in causes if isinstance(cause, OSError)), raised[0])
    return found if isinstance(found, Exception) else RuntimeError(str(found))


def check_shards(checkpoint: dict[str, Any], file: Path) -> None:
    """Find out, without reading them, whether the tensors of a checkpoint in `file` are all there.

    Raises:
        FileNotFoundError: if a file is missing or too short.
    """
    if SHARDS in checkpoint:
        folder = file.parent / checkpoint[SHARDS]
        for part in dcp.FileSystemReader(folder).read_metadata().storage_data.values():
            size = (folder / part.relative_path).stat().st_size
            if size < part.offset + part.length:
                raise FileNotFoundError(f"{folder.name}/{part.relative_path} is cut short")


def remove_unused_folders(file: Path) -> None:
    """Remove the folders of `file`, present and former, that no checkpoint beside it uses."""
    name = re.compile(rf"{re.escape(file.stem)}\.[0-9a-f]{{8}}\.{SHARDS}")
    if folders := [folder for folder in file.parent.iterdir() if name.fullmatch(folder.name)]:
        named = {_folder_of(checkpoint) for checkpoint in {file, *file.parent.glob("*.ckpt")}}
        for folder in folders:
            if folder.name not in named:
                shutil.rmtree(folder)


def _folder_of(file: Path) -> str | None:
    """The folder that a checkpoint names; of one that cannot be read, none."""
    try:
        return torch.load(file, map_location="meta", mmap=True, weights_only=True).get(SHARDS)
    except Exception:  # a corrupt file can raise anything
        return None


def named_tensors(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors by names that are the same on every rank."""
    found: dict[str, Tensor] = {}
    map_tensors(checkpoint, found.setdefault)
    return found


def map_tensors(checkpoint: dict[str, Any], swap: Callable[[str, Tensor], Any]) -> dict[str, Any]:
    """The checkpoint with `swap(name, tensor)` in the place of each tensor of weights and optimizers."""
    result = dict(checkpoint)
    for section in WEIGHTS:
        if section in checkpoint:
            result[section] = {name: swap(f"{section}.{name}", value) for name, value in checkpoint[section].items()}
    if "optimizer_states" in checkpoint:
        states = enumerate(checkpoint["optimizer_states"])
        result["optimizer_states"] = [_swapped(state, f"optimizer_states.{number}", swap) for number, state in states]
    return result


def _swapped(state: dict[str, Any], prefix: str, swap: Callable[[str, Tensor], Any]) -> dict[str, Any]:
    groups = state["param_groups"]
    names = {
        number: name for group in groups for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    moments = {
        number: {
            key: swap(f"{prefix}.{names[number]}.{key}", value) if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
        for number, values in state["state"].items()
    }
    return state | {"state": moments}
