"""Checkpoint files: complete or absent, readable without running code, and checked when they are read."""

import glob
import logging
import os
import re
import shutil
import zipfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from omegaconf import OmegaConf
from torch import Tensor, nn

from onecurve.checkpoint import sharded
from onecurve.errors import CheckpointUserError
from onecurve.network.net import NET
from onecurve.network.tensors import with_versions
from onecurve.patches.torch import tree_map
from onecurve.records.files import LAST, PREVIOUS, atomic_write
from onecurve.targets import plain_config

_log = logging.getLogger(__name__)
_PARTS = (L.LightningModule, L.LightningDataModule)  # whose hyper-parameters a checkpoint has
_HYPER_PARAMETERS = [part.CHECKPOINT_HYPER_PARAMS_KEY for part in _PARTS]
_TYPES = [part.CHECKPOINT_HYPER_PARAMS_TYPE for part in _PARTS]
_PLAIN_TYPES = (type(None), str, bytes, bool, int, float, Tensor)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under a temporary name, syncs it and renames it; Lightning also reads `ckpt_path` by it."""

    _has_checked = False  # whether a file of this run was found readable, or named as not

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path | str, storage_options: Any = None) -> None:
        """Write the file. A full disk ends in a UserError, and an existing file does not change."""
        file = Path(path)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            for name in (file.name, PREVIOUS):
                for left in file.parent.glob(f".{glob.escape(name)}.*.part"):  # by a process that was killed
                    left.unlink(missing_ok=True)
            with atomic_write(file) as temporary:
                with temporary.open("wb") as stream:
                    torch.save(_without_objects(checkpoint), stream)
                self._check_is_readable(temporary)
                if file.name == LAST and file.exists():
                    _link_or_copy(file, file.with_name(PREVIOUS))
        except (OSError, RuntimeError) as error:  # torch's zip writer raises RuntimeError for some OSErrors
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise write_error(file, cause) from error
        sharded.remove_unused_folders(file)  # also those of an earlier start under another strategy

    def _check_is_readable(self, file: Path) -> None:
        """Warn, at the first save, of an object for which the run could not be continued."""
        if self._has_checked:
            return
        self._has_checked = True
        try:
            torch.load(file, weights_only=True, map_location="meta", mmap=True)
        except UnpicklingError as error:
            _log.warning("no run can go on from these checkpoints: each %s", _object_in(error))

    def load_checkpoint(self, path: Path | str, map_location: Any = "cpu", weights_only: Any = True) -> dict[str, Any]:
        """Read `ckpt_path` for any strategy; it may contain objects only if the user says `weights_only=False`."""
        return read_checkpoint(path, map_location=map_location, weights_only=weights_only is not False)

    def remove_checkpoint(self, path: Path | str) -> None:
        super().remove_checkpoint(path)
        sharded.remove_unused_folders(Path(path))


def _object_in(error: UnpicklingError) -> str:
    """Return what torch says of a file with an object whose class only running code could load."""
    found = re.search(r"GLOBAL (\S+)", str(error))
    name = found[1].strip("`'\".,") if found else "an object"
    return (
        f"contains {name}: let on_save_checkpoint and state_dict return numbers, texts, tensors and containers of "
        "them, name the class to torch.serialization.add_safe_globals, or call fit and test with weights_only=False"
    )


def _as_plain(value: Any) -> Any:
    """Return a Python number for one of NumPy, such as a learning rate, and a tensor for an array of numbers.

    Hydra's lists and dictionaries, which it gives to a module or DataModule by default, become those of Python.
    """
    if isinstance(value, np.generic):
        return value.item()
    if OmegaConf.is_config(value):
        return plain_config(value)
    # A copy, as of an array whose order is reversed, which torch does not take.
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" else value


def _without_objects(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the checkpoint without what torch.load refuses: NumPy's numbers, and objects as hyper-parameters."""
    kept = {key: value for key, value in checkpoint.items() if key not in _TYPES}
    for key in [key for key in kept if not key.endswith("state_dict")]:  # which have versions as attributes
        kept[key] = tree_map(_as_plain, kept[key])
        if key in _HYPER_PARAMETERS:
            kept[key] = {name: value for name, value in kept[key].items() if is_plain(value)}
    return kept


def is_plain(value: Any) -> bool:
    """Return whether torch.load reads a value with weights_only=True."""
    if type(value) is dict:
        return all(is_plain(item) for pair in value.items() for item in pair)
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return type(value) in _PLAIN_TYPES


def _link_or_copy(file: Path, name: Path) -> None:
    """Give the file a second name, under which it remains when `file` is replaced."""
    with atomic_write(name) as temporary:
        try:
            os.link(file, temporary)
        except OSError:  # some file systems have no hard links
            shutil.copyfile(file, temporary)


def write_error(file: Path, cause: OSError) -> CheckpointUserError:
    return CheckpointUserError(
        f"cannot write the checkpoint {file} ({cause}): free some space, then continue with "
        f"ckpt_path={file.parent.parent}; the existing checkpoints are complete"
    )


def read_checkpoint(
    path: Path | str, option: str = "ckpt_path", map_location: Any = "cpu", weights_only: bool = True, **options: Any
) -> dict[str, Any]:
    """Load a checkpoint, including the tensors of a sharded one; `option` is where the user gave its path."""
    try:
        checkpoint = torch.load(path, weights_only=weights_only, map_location=map_location, **options)
        return checkpoint if map_location == "meta" else sharded.load_full(checkpoint, Path(path))
    except Exception as error:  # a corrupt file can raise anything
        raise _corruption_error(path, error, option) from error


def read_run_checkpoint(path: Path | str, option: str, **options: Any) -> dict[str, Any]:
    """Return the checkpoint in `path` after checking that a training run wrote it."""
    checkpoint = read_checkpoint(path, option, **options)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise CheckpointUserError(f"{option}={path} is not a checkpoint of a training run: it has no `state_dict`")
    return checkpoint


def read_weights(path: Path | str, option: str, **options: Any) -> dict[str, Tensor]:
    """Return the `state_dict` in `path`: a checkpoint of a run, or a file that contains nothing else."""
    content = read_checkpoint(path, option, **options)
    weights = content.get("state_dict", content) if isinstance(content, dict) else None
    if not weights or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointUserError(
            f"{option}={path} contains no weights: give a run, or a file with a network's `state_dict`"
        )
    return weights


def check_is_complete(path: Path, weights_only: bool = True) -> int:
    """Check that `path` is a complete checkpoint of a run; return the steps after which the run can go on from it.

    They are -1 if it has weights only, or lacks something of the step: the validation, or what came after an error.
    """
    try:
        if corrupt_member := zipfile.ZipFile(path).testzip():  # torch.load ignores a wrong checksum
            raise zipfile.BadZipFile(f"{corrupt_member} is corrupt")
        checkpoint = read_run_checkpoint(path, "ckpt_path", map_location="meta", mmap=True, weights_only=weights_only)
        sharded.check_shards(checkpoint, path)
        position = checkpoint.get("position", {})
        return -1 if position.get("is_incomplete") else int(position.get("steps", -1))
    except CheckpointUserError:
        raise
    except Exception as error:  # a corrupt file can raise anything
        raise _corruption_error(path, error, "ckpt_path") from error


def _corruption_error(path: Path | str, error: Exception, option: str) -> CheckpointUserError:
    if not Path(path).exists():
        return CheckpointUserError(f"{option}={path}: there is no such file")
    if isinstance(error, UnpicklingError) and zipfile.is_zipfile(path):  # the bytes of another file may look alike
        return CheckpointUserError(f"{option}={path} {_object_in(error)}")
    cause = str(error).split("\n")[0]
    return CheckpointUserError(f"{option}={path} is not a complete checkpoint ({cause}): use another")


def check_fits(saved: dict[str, Tensor], own: dict[str, Tensor], option: str = "ckpt_path") -> None:
    """Check that the weights of a checkpoint have the names and shapes of this module's weights."""
    mismatched = sorted(saved.keys() ^ own.keys()) or [name for name in own if saved[name].shape != own[name].shape]
    if mismatched:
        others = f" and {len(mismatched) - 1} more" if len(mismatched) > 1 else ""
        raise CheckpointUserError(
            f"{option} contains another network than this run's `model`: they differ in {mismatched[0]}{others}; "
            "set `model` and `data` as in that run"
        )


def load_initial_weights(module: nn.Module, path: str) -> None:
    """Load the weights of another run, or of a file with the `state_dict` of the network alone, into the module.

    If the last linear layer has another number of outputs, it keeps its initialization, and a log line reports it.
    """
    saved, own = read_weights(path, "init_from"), module.state_dict()
    if not saved.keys() & own.keys():
        saved = {f"{NET}.{name}": tensor for name, tensor in saved.items()}
    head = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)][-1:]
    shared = [name for name in own if name in saved and name.rpartition(".")[0] in head]
    fits = [name for name in shared if saved[name].shape[1:] == own[name].shape[1:]]
    resized = [name for name in fits if len(saved[name]) != len(own[name])]
    fitting = {name: tensor for name, tensor in saved.items() if name not in resized}
    check_fits(fitting, {name: own[name] for name in own if name not in resized}, f"init_from={path}")
    module.load_state_dict(with_versions(fitting, saved), strict=False)
    if resized:
        there, here = len(saved[resized[0]]), len(own[resized[0]])
        _log.info("init_from: %s classes there, %s here: %s start afresh", there, here, " and ".join(resized))
