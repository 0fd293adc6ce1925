"""What each ModelCheckpoint saves of a step has all that belongs to the step."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest import mock

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from onecurve.checkpoint.resumption import has_plateau_of_steps
from onecurve.records.files import CHECKPOINTS
from onecurve.run.saving import LastCheckpoint


class LateSaves(L.Callback):
    """Lets what each ModelCheckpoint saves of a step have all that belongs to the step.

    A run that goes on from a file begins with the next step, but Lightning saves before all of a step has come
    (loops/training_epoch_loop.py, `advance` and `on_advance_end`; loops/fit_loop.py, `on_advance_end`). Here a file is
    incomplete until the step has ended, and is saved again after more of it:

    | moment | what has come since the moment before | what is saved |
    | --- | --- | --- |
    | end of a batch | the module's hook, which may move a teacher | what is due, as what follows may fail |
    | end of a validation within the epoch | the validation | what monitors it; incomplete files, if nothing follows |
    | the next batch | the module's `on_validation_end`, ReduceLROnPlateau | incomplete files, if any has come |
    | end of the epoch | the last validation, the module's hook, EarlyStopping | what monitors them; incomplete files |
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        # `last.ckpt` has the state of the others, also of those that the module has made (`configure_callbacks`).
        # In place, as Lightning goes through the list now, to which a later callback may add another.
        cast(Any, trainer).callbacks.sort(key=lambda one: isinstance(one, LastCheckpoint))
        for saver in trainer.checkpoint_callbacks:
            if isinstance(saver, ModelCheckpoint):
                saver.dirpath = saver.dirpath or str(Path(trainer.default_root_dir) / CHECKPOINTS)
            is_last = isinstance(saver, ModelCheckpoint) and saver.CHECKPOINT_NAME_LAST == "last"
            if is_last and saver.save_weights_only:  # no run could go on from its last.ckpt
                saver.CHECKPOINT_NAME_LAST = "last-weights"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._has_plateau = has_plateau_of_steps(trainer)
        self._validation_is_followed = self._has_plateau or is_overridden("on_validation_end", pl_module)
        self._has_validated = False  # after the batch, within the epoch
        self._incomplete: dict[Any, tuple[ModelCheckpoint, Callable[[], None]]] = {}  # files, and what writes them
        self._hooks_waiting_for_epoch_end: list[Callable[[], None]] = []
        self._replaced: list[tuple[dict[str, Any], str]] = []  # attributes of an object, and the name of a hook
        self._savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        for saver in self._savers:
            self._replace(saver, "on_train_batch_end", partial(self._save_now, saver, saver.on_train_batch_end))
            self._replace(saver, "on_validation_end", partial(self._save_or_wait, saver, saver.on_validation_end))
            self._replace(saver, "on_train_epoch_end", partial(self._end_epoch, saver.on_train_epoch_end))
        if self._savers and is_overridden("on_train_batch_end", pl_module):
            self._call_before_saves(trainer, pl_module)

    def _call_before_saves(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Let the module's hook at the end of a batch come before those of the savers."""
        of_module, saves = module.on_train_batch_end, [saver.on_train_batch_end for saver in self._savers]

        def module_then_saves(*args: Any) -> None:
            of_module(*args)
            for save in saves:
                save(trainer, module, *args)

        for saver in self._savers:  # Lightning calls no hook that is not callable
            self._replace(saver, "on_train_batch_end", None)
        self._replace(module, "on_train_batch_end", module_then_saves)

    def _replace(self, owner: Any, hook: str, replacement: Any) -> None:
        vars(owner)[hook] = replacement
        self._replaced.append((vars(owner), hook))

    def teardown(self, *_: Any, **__: Any) -> None:
        for attributes, hook in vars(self).pop("_replaced", []):
            attributes.pop(hook, None)

    on_exception = teardown

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let `save_last` save what trains on, before a callback such as WeightAveraging sets the averaged weights."""
        for saver in self._savers:
            if type(saver).on_train_end is ModelCheckpoint.on_train_end and not saver.save_weights_only:
                saver.on_train_end(trainer, pl_module)
        self.teardown()

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        """Save again what lacks something that came later in the step before."""
        if self._has_validated or self._has_plateau:
            self._save_again(trainer)
        self._incomplete.clear()
        self._has_validated = False

    def _save_now(self, saver: ModelCheckpoint, hook: Callable[..., None], trainer: L.Trainer, *args: Any) -> None:
        """Call the hook of a saver; the files that it saves are incomplete."""
        save = trainer.save_checkpoint

        def save_and_keep(file: Any, *options: Any, **named: Any) -> None:
            save(file, *options, **named)
            self._incomplete[file] = (saver, partial(save, file, *options, **named))

        with mock.patch.object(trainer, "save_checkpoint", save_and_keep):
            hook(trainer, *args)

    def _save_or_wait(self, saver: ModelCheckpoint, hook: Callable[..., None], trainer: L.Trainer, *args: Any) -> None:
        """Call the hook of a saver at the end of a validation, or let it wait for the end of the epoch."""
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._hooks_waiting_for_epoch_end.append(partial(hook, trainer, *args))
            return
        self._has_validated = True
        if self._validation_is_followed:
            self._save_now(saver, hook, trainer, *args)
        else:
            hook(trainer, *args)
            if saver is self._savers[-1]:  # all have the best ones
                self._save_again(trainer)

    def _end_epoch(self, hook: Callable[..., None], trainer: L.Trainer, *args: Any) -> None:
        for of_validation in self._hooks_waiting_for_epoch_end:
            of_validation()
        self._hooks_waiting_for_epoch_end.clear()
        self._save_again(trainer)
        hook(trainer, *args)

    def _save_again(self, trainer: L.Trainer) -> None:
        """Save the incomplete files once more. Every rank must call it."""
        for file, (saver, save) in self._incomplete.items():
            if saver.file_exists(file, trainer):  # a better one may have replaced it
                save()
        self._incomplete.clear()
