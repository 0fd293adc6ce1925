"""The checkpoint that `ckpt_path` of a stage names, and the run that a fit of a script must not overwrite."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from onecurve.checkpoint.io import read_checkpoint
from onecurve.checkpoint.newest import checkpoint_file, newest_checkpoint
from onecurve.errors import UserError
from onecurve.records.files import CHECKPOINTS, LAST

_log = logging.getLogger(__name__)


def monitoring(trainer: L.Trainer) -> list[Any]:
    """Return the ModelCheckpoints that have a monitor."""
    return [one for one in trainer.checkpoint_callbacks if getattr(one, "monitor", None)]


def check_overwrites_nothing(trainer: L.Trainer, path: str | None) -> None:
    """Refuse a fit, from a checkpoint or from the beginning, in the folder of a run that it does not continue."""
    own = Path(trainer.default_root_dir) / CHECKPOINTS
    of_callbacks = [one.dirpath or own for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    if path and Path(path).resolve().parent in {Path(folder).resolve() for folder in (own, *of_callbacks)}:
        return
    if any(own.glob("*.ckpt")):  # on every rank: none has saved yet
        raise UserError(
            f"{trainer.default_root_dir} holds a run: continue it by fit(ckpt_path='last'), or give Trainer another "
            "default_root_dir"
        )
    if path and monitoring(trainer):
        _log.warning("the best checkpoint of the run of %s stays there: here it is that of later steps", path)


def find_checkpoint(trainer: L.Trainer, ckpt_path: str | Path | None, weights_only: bool) -> str | None:
    """Return the file that `ckpt_path` names, of a folder the newest complete one; None for `last` without any.

    `config/resolve.py` has resolved that of train.py already.
    """
    if ckpt_path == "best":
        return best_checkpoint(trainer, weights_only)
    folder = Path(trainer.default_root_dir)
    if not ckpt_path or (ckpt_path == "last" and not any((folder / CHECKPOINTS).glob("*.ckpt"))):
        return None
    path = folder if ckpt_path == "last" else Path(ckpt_path).expanduser()
    if not path.exists():  # such as a URL
        return str(ckpt_path)
    return str(newest_checkpoint(path, weights_only) or checkpoint_file(path))


def best_checkpoint(trainer: L.Trainer, weights_only: bool = True) -> str:
    """Return the best checkpoint of a run, that of rank zero, on every rank; another process may have fitted it."""
    callback = next(iter(monitoring(trainer)), None)
    own = (callback.best_model_path or _best_of_earlier_process(trainer, callback, weights_only)) if callback else ""
    path = trainer.strategy.broadcast(own)  # before the error, or a rank without a path would leave the others waiting
    if not callback or not path:
        raise UserError(
            f"no ModelCheckpoint has kept a best checkpoint in {trainer.default_root_dir}: fit with one that has a "
            "monitor, give the path of a file, or take the last weights"
        )
    if dist.is_initialized() and not trainer.strategy.reduce_boolean_decision(path == own):
        differs = f"{callback.monitor} differs between the ranks, and rank zero's is taken"
        _log.warning("the best checkpoint: %s: log it with sync_dist=True", differs)
    return path


def _best_of_earlier_process(trainer: L.Trainer, callback: ModelCheckpoint, weights_only: bool) -> str:
    last = Path(trainer.default_root_dir) / CHECKPOINTS / LAST
    options: Any = {"map_location": "meta", "mmap": True, "weights_only": weights_only}
    states = read_checkpoint(last, **options)["callbacks"] if last.is_file() else {}
    best = states.get(callback.state_key, {}).get("best_model_path")
    return str(Path(str(callback.dirpath)) / Path(best).name) if best else ""  # the folder may have moved
