"""Read checkpoints, and check that they are complete and fit the network."""

import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from torch import Tensor

from src.engine.state import sharded
from src.engine.utils.errors import UserError


def check_is_complete(path: Path, option: str = "ckpt_path") -> None:
    """Check that `path` is a complete checkpoint of a run."""
    try:
        if corrupt_member := zipfile.ZipFile(path).testzip():  # torch.load ignores a wrong checksum
            raise zipfile.BadZipFile(f"{corrupt_member} is corrupt")
        sharded.check_shards(read_run_checkpoint(path, option, map_location="meta", mmap=True), path)
    except UserError:
        raise
    except Exception as error:  # a corrupt file can raise anything
        raise corruption_error(path, error, option) from error


def read_weights(path: _PATH, option: str, **options: Any) -> dict[str, Tensor]:
    """Return the `state_dict` in `path`: a checkpoint of a run, or a file that contains nothing else.

    Raises:
        UserError: if the file cannot be read, or contains no weights; the message names `option`.
    """
    content = read_checkpoint(path, option, **options)
    weights = content.get("state_dict", content) if isinstance(content, dict) else None
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{option}={path} contains no weights: give a run, or a file with a network's `state_dict`")
    return weights


def check_fits(saved: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Check that the weights of a checkpoint have the names and shapes of this module's weights."""
    mismatched = sorted(saved.keys() ^ own.keys()) or [name for name in own if saved[name].shape != own[name].shape]
    if mismatched:
        others = f" and {len(mismatched) - 1} more" if len(mismatched) > 1 else ""
        raise UserError(
            f"ckpt_path contains another network than this run's `model`: they differ in {mismatched[0]}{others}; "
            "set `model` and `data` as in that run"
        )


def read_checkpoint(
    path: _PATH, option: str = "ckpt_path", moments: bool = True, map_location: Any = "cpu", **options: Any
) -> dict[str, Any]:
    """Load a checkpoint, including the tensors of a sharded one.

    `moments=False` does not read the optimizer state of a sharded checkpoint.

    Raises:
        UserError: if it cannot be read; the message names `option`.
    """
    try:
        checkpoint = torch.load(path, weights_only=True, map_location=map_location, **options)
        return checkpoint if map_location == "meta" else sharded.load_full(checkpoint, Path(path), moments)
    except Exception as error:  # a corrupt file can raise anything
        raise corruption_error(path, error, option) from error


def read_run_checkpoint(path: _PATH, option: str, **options: Any) -> dict[str, Any]:
    """Return the checkpoint in `path` after checking that a training run wrote it.

    Raises:
        UserError: if the file cannot be read, or has no `state_dict`; the message names `option`.
    """
    checkpoint = read_checkpoint(path, option, **options)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise UserError(f"{option}={path} is not a checkpoint of a training run: it has no `state_dict`")
    return checkpoint


def corruption_error(path: _PATH, error: Exception, option: str = "ckpt_path") -> UserError:
    """Return the error for a checkpoint that cannot be read."""
    cause = str(error).split("\n")[0]
    return UserError(f"{option}={path} is not a complete checkpoint ({cause}): use another")
