"""Checkpoint files: complete or absent, and readable without running code."""

import logging
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch
from hydra.errors import HydraException
from hydra.utils import instantiate
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.io import TorchCheckpointIO
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor, nn

from src import sharded
from src.errors import UserError
from src.files import replacing
from src.launch.folder import LAST, PREVIOUS, checkpoint_file

_log = logging.getLogger(__name__)


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
            with replacing(file) as temporary:
                with temporary.open("wb") as stream:
                    torch.save(checkpoint, stream)
                if file.name == LAST and file.exists():
                    _keep(file, file.with_name(PREVIOUS))
        except (OSError, RuntimeError) as error:  # torch's zip writer turns some of the former into the latter
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise unwritable(file, cause) from error

    def load_checkpoint(self, path: _PATH, map_location: Any = "cpu", weights_only: Any = True) -> dict[str, Any]:
        """Read the file, tensors and plain containers only.

        Raises:
            UserError: if it is no checkpoint, or not a whole one.
        """
        return read_checkpoint(path, map_location=map_location)

    def remove_checkpoint(self, path: _PATH) -> None:
        super().remove_checkpoint(path)
        sharded.discard(Path(path))


def unwritable(file: Path, cause: OSError) -> UserError:
    """What to say of a checkpoint that cannot be written."""
    return UserError(
        f"cannot write the checkpoint {file} ({cause}): free some space, then continue with "
        f"ckpt_path={file.parent.parent}; the checkpoints that are there are whole"
    )


def _keep(file: Path, name: Path) -> None:
    """Give the file a second name, under which it outlives its replacement."""
    with replacing(name) as temporary:
        try:
            os.link(file, temporary)
        except OSError:  # not every file system can
            shutil.copyfile(file, temporary)


def check_is_whole(path: Path, option: str = "ckpt_path") -> None:
    """Find out whether `path` is a checkpoint of a run with every byte in its place.

    Raises:
        UserError: if not.
    """
    try:
        if spoilt := zipfile.ZipFile(path).testzip():  # torch reads over a wrong check sum
            raise zipfile.BadZipFile(f"{spoilt} is damaged")
        sharded.check(read_run(path, option, map_location="meta", mmap=True), path)
    except UserError:
        raise
    except Exception as error:  # a damaged file can raise anything
        raise damaged(path, error, option) from error


def check_is_checkpoint(option: str, path: Path) -> None:
    """Find out, without reading the tensors, whether `path`, given by `option`, is a checkpoint of a run.

    Raises:
        UserError: if not.
    """
    read_run(path, option, map_location="meta", mmap=True)


def check_fits(saved: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    """Find out whether the weights of a checkpoint are those of a module of this shape.

    Raises:
        UserError: if not.
    """
    odd = sorted(saved.keys() ^ own.keys()) or [name for name in own if saved[name].shape != own[name].shape]
    if odd:
        raise UserError(
            f"ckpt_path holds another network than this run's `model`: they differ in {odd[0]}"
            f"{f' and {len(odd) - 1} more' if len(odd) > 1 else ''}; leave `model` and `data` as that run had them"
        )


def network_of(path: str, option: str) -> tuple[nn.Module, DictConfig]:
    """The network that a checkpoint holds, with its weights, and the configuration of its run.

    Raises:
        UserError: if it holds none, or one that this code cannot build; `option` is named.
    """
    checkpoint = read_run(checkpoint_file(Path(path)), option)
    config: Any = OmegaConf.create(checkpoint.get("config", ""))
    try:
        described = config.module.net
        target = str(described._target_)  # exactly src.models.FILE.NAME: a longer path leads to what the file imports
        if not re.fullmatch(r"src\.models\.\w+\.\w+", target) or OmegaConf.to_yaml(described).count("_target_") > 1:
            raise UserError(f"refused: {option}={path} would run {target}, which is no model of this project")
        net = instantiate(described, _convert_="all")
        net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in checkpoint["state_dict"].items()})
    except (HydraException, OmegaConfBaseException, RuntimeError) as error:
        raise UserError(f"{option}={path} is no checkpoint of a classifier: {str(error).splitlines()[0]}") from error
    return net, config


def start_from(module: nn.Module, path: str) -> None:
    """Give the module the weights of another run, which may have had another number of classes.

    The last linear layer may differ in its number of outputs: then it stays as initialised, and that is said.

    Raises:
        UserError: if that run had another network.
    """
    saved, own = read_run(path, "init_from")["state_dict"], module.state_dict()
    head = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)][-1:]
    fresh = [name for name in own if name in saved and saved[name].shape != own[name].shape]
    inputs = [name for name in fresh if saved[name].shape[1:] != own[name].shape[1:]]
    inner = [name for name in fresh if name.rpartition(".")[0] not in head]
    if odd := sorted(saved.keys() ^ own.keys()) or inner or inputs:
        raise UserError(f"init_from={path} holds another network than this run's `model`: they differ in {odd[0]}")
    module.load_state_dict({name: saved[name] for name in own if name not in fresh}, strict=False)
    if fresh:
        there, here = len(saved[fresh[0]]), len(own[fresh[0]])
        _log.info("init_from: %s classes there, %s here: %s start afresh", there, here, " and ".join(fresh))


def read_checkpoint(
    path: _PATH, option: str = "ckpt_path", moments: bool = True, map_location: Any = "cpu", **options: Any
) -> dict[str, Any]:
    """What `torch.load` reads, of a sharded checkpoint with its tensors, but for the optimisers' if not `moments`.

    Raises:
        UserError: if it cannot be read; `option` is named.
    """
    try:
        checkpoint = torch.load(path, weights_only=True, map_location=map_location, **options)
        return checkpoint if map_location == "meta" else sharded.fill(checkpoint, Path(path), moments)
    except Exception as error:  # a damaged file can raise anything
        raise damaged(path, error, option) from error


def read_run(path: _PATH, option: str, **options: Any) -> dict[str, Any]:
    """The same, of a run.

    Raises:
        UserError: also if it is something else; `option` is named.
    """
    checkpoint = read_checkpoint(path, option, **options)
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise UserError(f"{option}={path} is no checkpoint of a training run: it has no `state_dict`")
    return checkpoint


def damaged(path: _PATH, error: Exception, option: str = "ckpt_path") -> UserError:
    """What to say of a checkpoint that cannot be read."""
    cause = str(error).split("\n")[0]
    return UserError(f"{option}={path} is no whole checkpoint ({cause}): take another")
