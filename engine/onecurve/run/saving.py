"""Save the latest state of a run, and find the best one."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from onecurve.checkpoint.io import read_checkpoint
from onecurve.checkpoint.newest import newest_checkpoint
from onecurve.checkpoint.resumption import has_plateau_of_steps
from onecurve.checkpoint.run_files import CHECKPOINTS, LAST, checkpoint_file
from onecurve.errors import UserError
from onecurve.observe.steps import RankConsensus, trained_steps

_log = logging.getLogger(__name__)


class LastCheckpoint(Checkpoint):
    """Keeps one checkpoint: the state at the end of an epoch, after its validation, or at a later step.

    The end of the last epoch is always saved.

    Lightning's ModelCheckpoint does not fit. Its saves at a step or a time replace the save at the end of the epoch, a
    time interval costs a broadcast at every step, and `save_last` skips epochs in which the monitored metric did not
    improve. The checkpoint of a step is written when the next step begins, because before that the step's metrics and
    an epoch's validation are not yet logged. `PreemptionHandler` calls `save_if_due` then, before other callbacks begin
    the step; Lightning calls the hooks of checkpoint callbacks last.

    Args:
        every_n_epochs: epochs between saves; None for a save at the end of the run only.
        every_n_train_steps: optimizer steps between additional saves.
        train_time_interval: seconds after the last save at which a rank requests another.
    """

    # A logger that uploads checkpoints reads these, as of a ModelCheckpoint that monitors nothing.
    monitor, best_model_score, save_top_k = None, None, 1

    def __init__(
        self,
        dirpath: str,
        every_n_epochs: int | None = 1,
        every_n_train_steps: int | None = None,
        train_time_interval: float | None = None,
    ) -> None:
        for name, interval in {"every_n_epochs": every_n_epochs, "every_n_train_steps": every_n_train_steps}.items():
            if interval is not None and interval < 1:
                raise UserError(f"callbacks.checkpoint.{name}={interval}: give at least 1, or null")
        self.best_model_path = str(Path(dirpath) / LAST)  # the name that loggers read
        self._epoch_interval, self._step_interval = every_n_epochs, every_n_train_steps
        self._time_interval = train_time_interval

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._saved_at, self._consensus = time.monotonic(), RankConsensus()
        self._saved_step = trained_steps(trainer)  # a resumed run begins with a state that is saved already

    def save_if_due(self, trainer: L.Trainer) -> None:
        """Save before a step, if the number of steps or the time says so. Every rank must call it before each step."""
        should_save = self._step_interval is not None and trained_steps(trainer) % self._step_interval == 0
        if self._time_interval is not None:
            # Every rank must poll at every step, also when the step alone decides.
            is_over = time.monotonic() - self._saved_at >= self._time_interval
            should_save = bool(self._consensus.poll(trainer, lambda: is_over)) or should_save
        if should_save:
            self._save_once(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epochs = trainer.current_epoch + 1
        has_all_steps = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
        is_last = trainer.should_stop or has_all_steps or epochs == trainer.max_epochs
        if is_last or (self._epoch_interval and epochs % self._epoch_interval == 0):
            self._save_once(trainer)

    def _save_once(self, trainer: L.Trainer) -> None:
        if trained_steps(trainer) != self._saved_step:
            self.save(trainer)

    def save(self, trainer: L.Trainer) -> None:
        """Save, and tell the loggers. Every rank must call it."""
        trainer.save_checkpoint(self.best_model_path, weights_only=False)
        self._saved_step, self._saved_at = trained_steps(trainer), time.monotonic()
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)  # type: ignore[arg-type]


class LateSaves(L.Callback):
    """Lets what each ModelCheckpoint saves of a step have all that belongs to the step.

    A run that goes on from a file begins with the next step. Lightning saves before the module's `on_train_batch_end`,
    which may move a teacher, before a validation, a ReduceLROnPlateau of each step, and the end of an epoch
    (loops/training_epoch_loop.py, `advance` and `on_advance_end`; loops/fit_loop.py, `on_advance_end`). Here:

    1. At the end of a batch the module's hook comes first. A ModelCheckpoint then saves at once, as what follows may
       fail; its files are incomplete until the step has ended.
    2. At the end of a validation it saves what it monitors, and incomplete files once more: now, or at 3 if the module
       has an `on_validation_end`, or a ReduceLROnPlateau of each step follows. After the last batch of an epoch its
       hook waits for 4.
    3. As the next batch begins, files that are still incomplete are saved once more, if something has followed.
    4. At the end of an epoch, after the hooks of the module and of EarlyStopping, so are they, and what waits comes.
    """

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._has_plateau = has_plateau_of_steps(trainer)
        self._validation_is_followed = self._has_plateau or is_overridden("on_validation_end", pl_module)
        self._has_validated = False
        self._incomplete: dict[Any, tuple[ModelCheckpoint, Callable[[], None]]] = {}  # files, and what writes them
        self._waiting: list[Callable[[], None]] = []  # hooks of a validation
        self._replaced: list[tuple[dict[str, Any], str]] = []  # attributes of an object, and the name of a hook
        self._savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        for saver in self._savers:
            self._replace(saver, "on_train_batch_end", partial(self._save_now, saver, saver.on_train_batch_end))
            self._replace(saver, "on_validation_end", partial(self._validate, saver, saver.on_validation_end))
            self._replace(saver, "on_train_epoch_end", partial(self._end_epoch, saver, saver.on_train_epoch_end))
        if self._savers and is_overridden("on_train_batch_end", pl_module):
            of_module, saves = pl_module.on_train_batch_end, [one.on_train_batch_end for one in self._savers]

            def module_then_saves(*args: Any) -> None:
                of_module(*args)
                for save in saves:
                    save(trainer, pl_module, *args)

            for saver in self._savers:  # Lightning calls no hook that is not callable
                self._replace(saver, "on_train_batch_end", None)
            self._replace(pl_module, "on_train_batch_end", module_then_saves)

    def _replace(self, owner: Any, hook: str, replacement: Any) -> None:
        vars(owner)[hook] = replacement
        self._replaced.append((vars(owner), hook))

    def teardown(self, *_: Any, **__: Any) -> None:
        for attributes, hook in vars(self).pop("_replaced", []):
            attributes.pop(hook, None)

    on_train_end = on_exception = teardown

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Save again what lacks something that came later in the step before."""
        if self._has_validated or self._has_plateau:
            self._save_again(trainer)
        self._incomplete.clear()
        self._has_validated = False

    def _save_now(self, saver: ModelCheckpoint, hook: Callable[..., None], trainer: L.Trainer, *args: Any) -> None:
        save = trainer.save_checkpoint

        def save_and_keep(file: Any, *options: Any, **named: Any) -> None:
            save(file, *options, **named)
            self._incomplete[file] = (saver, partial(save, file, *options, **named))

        with mock.patch.object(trainer, "save_checkpoint", save_and_keep):
            hook(trainer, *args)

    def _validate(self, saver: ModelCheckpoint, hook: Callable[..., None], trainer: L.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._waiting.append(partial(hook, trainer, *args))
            return
        self._has_validated = True
        if self._validation_is_followed:
            self._save_now(saver, hook, trainer, *args)
        else:
            hook(trainer, *args)
            if saver is self._savers[-1]:  # all have the best ones
                self._save_again(trainer)

    def _end_epoch(self, _: ModelCheckpoint, hook: Callable[..., None], trainer: L.Trainer, *args: Any) -> None:
        for of_validation in self._waiting:
            of_validation()
        self._waiting.clear()
        self._save_again(trainer)
        hook(trainer, *args)

    def _save_again(self, trainer: L.Trainer) -> None:
        """Write the files of a step once more. Every rank must call it."""
        for file, (saver, save) in self._incomplete.items():
            if saver.file_exists(file, trainer):  # a better one may have replaced it
                save()
        self._incomplete.clear()


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
