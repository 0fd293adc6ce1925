"""What Lightning does not restore: position in the data, frozen weights, scores of checkpoints, optimizers by name."""

import logging
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.pytorch import callbacks

from onecurve.checkpoint.optimizer_state import name_parameters, restore_by_name
from onecurve.errors import UserError
from onecurve.patches.lightning_loops import set_progress, set_steps_of_loggers, steps_of_loggers

_log = logging.getLogger(__name__)


class ExactResumption(L.Callback):
    """Saves and restores what Lightning does not, or restores only on the same hardware.

    - The position in the data is an epoch, the steps trained in it, and the steps of the run. Lightning stores the
      values that its loop counters have while a hook runs. The counters are therefore derived from the position: at
      whatever moment the checkpoint was written, the loops are restored to the start of the first step that is not
      complete.
    - Optimizers of any module restore their state by the names of the parameters, also in groups that were added.
    - Weights that were frozen or unfrozen while the run trained are so again. Lightning's callbacks repeat it only when
      they come to the same epoch.
    - Checkpoint callbacks keep their scores, also in a folder that was moved. Lightning's ModelCheckpoint discards them
      if its absolute path has changed, and then replaces the best checkpoint by a worse one; it saves `current_score`
      but does not restore it. (`ModelCheckpoint.load_state_dict`,
      https://github.com/Lightning-AI/pytorch-lightning/blob/2.6.6/src/lightning/pytorch/callbacks/model_checkpoint.py)
    - What another process has trained is evaluated at its step, where Lightning logs at step 0.
    - A run that EarlyStopping has ended stays ended, unless its patience has changed; Lightning would train until the
      next check, and restores the patience as well.
    """

    _has_trained = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for one in _savers_of_errors(trainer):
            vars(one).pop("on_exception", None)
        if stage == "fit":
            self._data: Any = trainer.datamodule  # a test may have other data, and the script saves after it
            self._epoch = trainer.fit_loop.epoch_progress.current.processed  # that of the next step
            self._steps = self._epoch_steps = 0  # trained in the run, and in this epoch
            self._requires_grad: dict[str, bool] = {}  # by name; first that of a checkpoint, then as training begins
            self._early_stop: str | None = None  # why a callback has ended the run
            self._has_trained = self._is_last_of_epoch = False

    def on_exception(self, trainer: L.Trainer, *_: Any) -> None:
        """Save nothing of a fit that has not begun: it has no position yet, and an earlier fit may have left a file."""
        for one in _savers_of_errors(trainer) if not self._has_trained else ():
            vars(one)["on_exception"] = None  # Lightning calls no hook that is not callable
        self._has_trained = False

    def teardown(self, *_: Any, **__: Any) -> None:
        self._has_trained = False  # an error of the next stage may come before its `setup`

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Prepare the optimizers, which Lightning restores after this hook."""
        for optimizer in trainer.optimizers:
            name_parameters(optimizer, pl_module)
            restore_by_name(optimizer, pl_module)
        wrappers: Any = pl_module.optimizers()
        # A wrapper finds the methods of the class otherwise, past ours, which name the weights.
        for wrapper in wrappers if isinstance(wrappers, list) else [wrappers]:
            wrapper.add_param_group = wrapper.optimizer.add_param_group
            wrapper.load_state_dict = wrapper.optimizer.load_state_dict
        # Not earlier: the module chooses the weights of its optimizer as at the start of the run.
        saved, self._requires_grad = self._requires_grad, _requires_grad(pl_module)
        for name, weight in pl_module.named_parameters():
            weight.requires_grad_(saved.get(name, weight.requires_grad))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stop a run that a callback has already stopped, even if `min_epochs` postponed the end."""
        self._has_trained = True
        if self._early_stop:
            trainer.should_stop = True
            reason = self._early_stop.strip().rstrip(".")
            _log.warning("EarlyStopping has ended this run (%s): change its patience, or leave it out", reason)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the test log at the last step and epoch, also if training stopped early or did not run.

        It tests averaged weights also then: their callbacks put them into the module after the last checkpoint.
        """
        set_progress(trainer, self._position(trainer))
        if not self._has_trained:
            for callback in cast(Any, trainer).callbacks:
                if _has_average(callback, trainer.current_epoch):
                    callback.on_train_end(trainer, pl_module)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        set_steps_of_loggers(trainer, self._steps)  # -1 after Lightning's LearningRateFinder
        # Not before this hook: Lightning says so while the batch is moved to the device, which may fail.
        self._is_last_of_epoch = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch

    on_train_epoch_start = on_train_batch_start  # for what LearningRateMonitor logs there in a resumed run

    def on_train_batch_end(self, *_: Any) -> None:
        self._steps += 1
        self._epoch_steps += 1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop
        # Else the run stops within the epoch. Lightning does not know the last batch of several loaders that a stream
        # without a length ends.
        if loop.batch_progress.is_last_batch or not loop.done:
            self._epoch, self._epoch_steps = self._epoch + 1, 0

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["position"] = position = self._position(trainer)
        epochs, before = trainer.fit_loop.epoch_progress.current, self._requires_grad
        lacks_end_of_epoch = epochs.processed < position["epoch"]
        position["is_incomplete"] = trainer.interrupted or lacks_end_of_epoch or _may_be_followed(trainer)
        is_at_start = epochs.started > epochs.processed == position["epoch"]
        checkpoint["has_begun_epoch"] = position["epoch_steps"] > 0 or is_at_start
        # A continued run with other frozen weights in its configuration keeps those.
        changed = {name: flag for name, flag in _requires_grad(pl_module).items() if before.get(name, flag) != flag}
        checkpoint["requires_grad"] = changed

    def _position(self, trainer: L.Trainer) -> dict[str, Any]:
        """Return the epoch in which the next step is, the steps that it has had, and those of the run.

        The hooks of this callback count them. A save may come before a hook: of a step if its schedule fails, for which
        OnExceptionCheckpoint saves, or of an epoch, as the validation after its last step comes before its end.
        """
        epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
        epoch, epoch_steps, steps = self._epoch, self._epoch_steps, self._steps
        is_in_epoch = epochs.started > epochs.processed  # else the batches may be those of the epoch before
        if is_in_epoch:
            epoch_steps = batches.current.processed
            steps += epoch_steps - self._epoch_steps
        has_ended = self._is_last_of_epoch and batches.current.processed == batches.current.ready
        if has_ended and epoch_steps > 0:
            epoch, epoch_steps = epoch + 1, 0
        streams = self._data.states_after(epoch_steps)
        return {"epoch": epoch, "epoch_steps": epoch_steps, "steps": steps, "streams": streams}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Rewrite the saved states, from which Lightning restores its loops and the callbacks afterwards."""
        if trainer.training:
            self._restore_position(trainer, checkpoint)
            self._requires_grad = checkpoint.get("requires_grad", {})
            states = checkpoint["callbacks"]
            for callback in cast(Any, trainer).callbacks:
                if isinstance(callback, callbacks.BaseFinetuning) and callback.state_key in states:
                    # Its groups would replace those of the optimizer.
                    states[callback.state_key]["internal_optimizer_metadata"] = {}
            _restore_history(trainer, states)
            self._early_stop = _restore_early_stopping(trainer, states)
            if any(isinstance(callback, callbacks.ModelPruning) for callback in cast(Any, trainer).callbacks):
                _log.warning("ModelPruning saves no masks: what it has pruned trains again, until it prunes anew")
        elif "position" in checkpoint and not steps_of_loggers(trainer):  # trained by another process
            set_progress(trainer, checkpoint["position"])

    def _restore_position(self, trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
        data, position = cast(Any, trainer.datamodule), checkpoint["position"]
        # With batch normalization it trains an epoch more.
        averages = any(isinstance(one, callbacks.StochasticWeightAveraging) for one in cast(Any, trainer).callbacks)
        if trainer.max_epochs not in (None, -1) and position["epoch"] > trainer.max_epochs + averages:
            raise UserError(
                f"trainer.max_epochs={trainer.max_epochs}: the run in ckpt_path has already trained "
                f"{position['epoch']} epochs; set it higher, or evaluate the run with fit=false"
            )
        every = trainer.reload_dataloaders_every_n_epochs
        if every > 1 and position["epoch"] % every:
            counts = f"counts from epoch {position['epoch']}, in which this run goes on"
            _log.warning("reload_dataloaders_every_n_epochs=%d %s: its data may be other ones", every, counts)
        loops = checkpoint["loops"]["fit_loop"]
        if loops["epoch_progress"]["current"]["processed"] < position["epoch"]:
            left_out = f"the validation and the hooks at the end of epoch {position['epoch'] - 1}"
            _log.warning("%s was saved before %s, which this run leaves out", trainer.ckpt_path, left_out)
        elif position.get("is_incomplete"):
            step = f"step {position['steps']}"
            _log.warning("%s was saved before the end of %s, which this run leaves out", trainer.ckpt_path, step)
        self._epoch, self._epoch_steps, self._steps = (position[key] for key in ("epoch", "epoch_steps", "steps"))
        data.resume(self._epoch, self._epoch_steps, position["streams"])
        _rewind(loops, self._epoch, self._epoch_steps, total=self._steps)
        # Lightning counts the last step itself.
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = self._steps - 1


def _savers_of_errors(trainer: Any) -> list[L.Callback]:
    return [one for one in trainer.callbacks if isinstance(one, callbacks.OnExceptionCheckpoint)]


def _may_be_followed(trainer: L.Trainer) -> bool:
    """Return whether a validation, or a ReduceLROnPlateau of each step, may follow what is saved within a step."""
    batches = trainer.fit_loop.epoch_loop.batch_progress
    counts = batches.current if trainer.check_val_every_n_epoch else batches.total
    # There is no such number if the time decides.
    validates = trainer.enable_validation and counts.processed % (trainer.val_check_batch or 1) == 0
    is_in_step = batches.current.completed < batches.current.processed
    return is_in_step and (validates or has_plateau_of_steps(trainer))


def has_plateau_of_steps(trainer: L.Trainer) -> bool:
    """Return whether a ReduceLROnPlateau takes a step after each of training."""
    return any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs)


def _has_average(callback: L.Callback, epochs: int) -> bool:
    """Return whether a callback averages weights, and the module of a run that has ended does not have them yet."""
    if isinstance(callback, callbacks.StochasticWeightAveraging):
        has_averaged = callback.state_dict()["latest_update_epoch"] >= 0  # not if the run had no such callback
        return has_averaged and epochs == callback.swa_end + 1  # with batch norm an epoch more, and they are saved
    return isinstance(callback, callbacks.WeightAveraging)


def _requires_grad(module: L.LightningModule) -> dict[str, bool]:
    return {name: weight.requires_grad for name, weight in module.named_parameters()}


def _rewind(loops: dict[str, Any], epoch: int, step: int, total: int) -> None:
    """Set the saved counters of the fit loop, in place, to the state before a step of an epoch, `total` in the run.

    An epoch that is ready but not started is the only state from which Lightning calls `on_train_epoch_start`, keeps
    the count of batches and does not repeat a validation. `total.completed`, which nothing else reads, lags by two:
    equal to the others, or one less, Lightning would take it for a restart inside a hook. All numbers count from zero.
    """
    loops["epoch_progress"] = _progress(epoch, ready=epoch + 1)
    loops["epoch_loop.batch_progress"] = {
        "total": _counts(total) | {"completed": total - 2},
        "current": _counts(step),
        "is_last_batch": False,
    }
    loops["epoch_loop.val_loop.batch_progress"] = _progress(0) | {"is_last_batch": False}


def _counts(value: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), value)


def _progress(value: int, **changes: int) -> dict[str, Any]:
    return {"total": _counts(value) | changes, "current": _counts(value) | changes}


def _restore_history(trainer: L.Trainer, states: dict[str, Any]) -> None:
    """Restore the scores of the checkpoint callbacks, and write the present paths into their saved states."""
    folder = Path(str(trainer.ckpt_path)).resolve().parent
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key)
        if isinstance(callback, callbacks.ModelCheckpoint) and state:
            callback.current_score = state["current_score"]
            # A file in another folder is a copy from another run, and a new history begins.
            if Path(str(callback.dirpath)).resolve() == folder:
                states[callback.state_key] = _replace_folder(state, state["dirpath"], str(callback.dirpath))


def _restore_early_stopping(trainer: Any, states: dict[str, Any]) -> str | None:
    """Return why an EarlyStopping has ended the run, if so; in the states, a changed patience makes it decide anew."""
    reason = None
    for callback in trainer.early_stopping_callbacks:
        state = states.get(callback.state_key)
        if state and state.get("patience", callback.patience) != callback.patience:
            states[callback.state_key] = state | {"patience": callback.patience, "stopping_reason_message": None}
        elif state and state.get("stopping_reason_message"):
            reason = state["stopping_reason_message"]
    return reason


def _replace_folder(value: Any, old: str, new: str) -> Any:
    """Return the state, or a part of it, with the prefix `old` of every path replaced by `new`."""
    if isinstance(value, dict):
        return {_replace_folder(key, old, new): _replace_folder(item, old, new) for key, item in value.items()}
    return new + value.removeprefix(old) if isinstance(value, str) and value.startswith(old) else value
