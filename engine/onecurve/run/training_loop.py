"""Changes of Lightning's loops, and checks of its schedules, of monitored metrics and of divergence."""

import logging
import math
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch.optim.lr_scheduler import OneCycleLR

from onecurve.errors import DivergedUserError, UserError
from onecurve.network.tensors import to_local
from onecurve.observe.steps import is_log_point, trained_steps
from onecurve.parallel.gather import gather_objects
from onecurve.parallel.norm_groups import NormGroups
from onecurve.patches.lightning_loops import CheckpointConnector, leave_signals_alone, replace_parts
from onecurve.random.dropout import use_sample_dropout
from onecurve.run.logged_values import LoggedValues, LogPoints
from onecurve.run.metric_states import VirtualMetrics
from onecurve.run.step import StepInParts

_log = logging.getLogger(__name__)
_BATCH_HOOKS = ["on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
_BATCH_HOOKS += ["on_before_optimizer_step", "on_train_batch_end"]
_BATCH_HOOKS += ["on_validation_batch_start", "on_validation_batch_end"]


def patch_trainer(trainer: L.Trainer, virtual: VirtualMetrics | None) -> None:
    """Give a trainer this library's step, logged values, log points and loading of checkpoints.

    Step and logging are in `onecurve/run/step.py` and `onecurve/run/logged_values.py`. Before Lightning loads a
    checkpoint, `_PreparingConnector` prepares the module. `virtual` is that of a run with `bit_exact`.
    """
    leave_signals_alone(trainer)
    dtype = torch.float64 if trainer.precision == "64-true" else torch.float32

    def logged_values(training: bool) -> LoggedValues:
        return LoggedValues(training, dtype, virtual, trainer)

    parts: Any = replace_parts(trainer, StepInParts, logged_values, _PreparingConnector, LogPoints)
    parts.virtual = virtual


def skip_empty_hooks(callbacks: Iterable[L.Callback]) -> None:
    """Let Lightning pass over hooks of a batch that a callback does not have (docs/benchmarks/speed.md has the gain).

    Lightning calls no hook that is not callable (trainer/call.py, `_call_callback_hooks`). Callbacks of a project stay
    as they are, because their code may call each other's hooks.
    """
    for callback in callbacks:
        if type(callback).__module__.startswith(("onecurve.", "lightning.")):
            for hook in _BATCH_HOOKS:
                if getattr(type(callback), hook) is getattr(L.Callback, hook):
                    vars(callback).setdefault(hook, None)


class _PreparingConnector(CheckpointConnector):
    """Prepares layers that a module makes in `setup` or `configure_model`, as `Trainer.prepare_module` the others."""

    def prepare_late_layers(self) -> None:
        trainer: Any = self.trainer
        module = trainer.lightning_module
        trainer.precision_plugin.convert_module(module)
        use_sample_dropout(module)
        for callback in trainer.callbacks:
            if isinstance(callback, NormGroups):
                callback.setup(trainer, module, trainer.state.fn)


class ScheduleCheck(L.Callback):
    """Refuses schedules and validation intervals that do not fit the run; makes up for steps of ReduceLROnPlateau.

    Lightning steps ReduceLROnPlateau after an epoch's checkpoint is saved, and not at all
    after the first epoch of a restart (`_FitLoop.on_advance_end` and `_TrainingEpochLoop._update_learning_rates` in
    loops/).
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if stage != "fit" or not data.evaluates("val") or trainer.check_val_every_n_epoch is None:
            return
        interval, steps = trainer.val_check_interval, data.steps_per_epoch
        if isinstance(interval, int) and steps is not None and interval > steps:
            raise UserError(
                f"trainer.val_check_interval={interval} exceeds the {steps} steps of an epoch: "
                "set a smaller value, or trainer.check_val_every_n_epoch=null"
            )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.last_step = trainer.datamodule.last_step  # `is_log_point` reads it
        skip_empty_hooks(trainer.callbacks)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a OneCycleLR that ends too early, and a ReduceLROnPlateau that steps without a new value."""
        data: Any = trainer.datamodule
        for config in trainer.lr_scheduler_configs if data.steps_per_epoch else ():
            epochs = -(-data.total_steps // data.steps_per_epoch)
            steps = (data.total_steps if config.interval == "step" else epochs) // config.frequency
            if isinstance(config.scheduler, OneCycleLR) and config.scheduler.total_steps < steps:
                way_out = "give it total_steps=trainer.estimated_stepping_batches"
                if trainer.ckpt_path:
                    way_out = "set them as in that run, or begin another schedule with its weights by init_from"
                raise UserError(
                    f"trainer.max_epochs and max_steps make {steps} steps of OneCycleLR, which ends after "
                    f"{config.scheduler.total_steps}: {way_out}"
                )
        every = trainer.check_val_every_n_epoch or 1
        for config in _plateau_configs(trainer):
            if config.monitor.startswith("val") and config.frequency % every:
                raise UserError(
                    f"scheduler.frequency={config.frequency}, but validation is every {every} epochs "
                    f"(trainer.check_val_every_n_epoch): set scheduler.frequency={every}"
                )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        for config in _plateau_configs(trainer):
            is_due = config.scheduler.last_epoch < trainer.current_epoch // config.frequency
            if is_due and config.monitor in metrics:
                pl_module.lr_scheduler_step(config.scheduler, metrics[config.monitor])


def _plateau_configs(trainer: L.Trainer) -> list[Any]:
    configs = trainer.lr_scheduler_configs
    return [config for config in configs if config.reduce_on_plateau and config.interval == "epoch"]


class MonitorCheck(L.Callback):
    """Lets a sanity check show whether the metrics that callbacks monitor exist, which Lightning asks after an epoch.

    Args:
        callbacks: the user's, by their options.
    """

    _are_compared = True  # outside of a fit, nothing follows a metric

    def __init__(self, callbacks: dict[str, L.Callback]) -> None:
        self._monitors = {name: str(one.monitor) for name, one in callbacks.items() if getattr(one, "monitor", None)}
        self._after_validation = {name for name in self._monitors if _acts_after_validation(callbacks[name])}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        monitors = dict(self._monitors)
        for config in _plateau_configs(trainer):
            monitors |= {"ReduceLROnPlateau": config.monitor} if config.strict else {}
        self._of_validation = {name: monitor for name, monitor in monitors.items() if monitor.startswith("val")}
        self._are_compared = False
        if not trainer.datamodule.evaluates("val"):
            self._refuse_or_warn()
        known = {"val/loss", "val/acc"} if getattr(pl_module, "takes_batch", False) else set()  # of this template
        if not known.issuperset(self._of_validation.values()):
            trainer.num_sanity_val_steps = trainer.num_sanity_val_steps or 1

    def _refuse_or_warn(self) -> None:
        if monitor := self._of_validation.get("ReduceLROnPlateau"):
            raise UserError(
                f"ReduceLROnPlateau monitors {monitor}, but the run has no validation: give it validation data, or let "
                "it monitor a metric of training"
            )
        if waiting := sorted({*self._of_validation, *self._after_validation}):
            _log.warning("the run has no validation, so %s cannot act", " and ".join(waiting))

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = trainer.callback_metrics
        for name, monitor in self._of_validation.items():
            if logged and monitor not in logged:  # a module may log nothing in the sanity check
                raise UserError(
                    f"{name} monitors {monitor}, which validation does not log (it logs {', '.join(logged)}): "
                    "set its `monitor` to one of these, and its `mode` to min if less is better"
                    + (f"; or {name}=null" if "." in name else "")
                )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare the ranks at the sanity check, which a run that goes on does not have, or at its first validation."""
        if not self._are_compared:
            self._are_compared, logged = True, trainer.callback_metrics
            self._check_reduction(
                {name: float(logged[name]) for name in self._of_validation.values() if name in logged}
            )

    def _check_reduction(self, own: dict[str, float]) -> None:
        """Compare the values of the ranks: callbacks follow that of rank zero, and schedules each their own."""
        ranks = gather_objects(own)
        for name, monitor in self._of_validation.items():
            if len({str(rank.get(monitor)) for rank in ranks}) > 1:
                problem = (
                    f"{name} monitors {monitor}, which each rank has of its own samples: log it with sync_dist=True"
                )
                if name == "ReduceLROnPlateau":
                    raise UserError(problem)
                _log.warning("%s, or it follows rank zero's", problem)


def _acts_after_validation(callback: Any) -> bool:
    """Return whether EarlyStopping or ModelCheckpoint is set to act there only, whatever metric it monitors."""
    return any(getattr(callback, f"_{act}_on_train_epoch_end", None) is False for act in ("check", "save"))


class FiniteCheck(L.Callback):
    """Stops a run that has diverged.

    The loss is checked at every log point, where all ranks stop together: `train/loss` of a module that takes weighted
    batches, which is the same on every rank, or else what the step returns. All weights are checked before a checkpoint
    is saved. If ranks hold different weights, one rank may stop alone; the launcher then ends the others.
    """

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        if not is_log_point(trainer, trained_steps(trainer)):
            return
        if getattr(pl_module, "takes_batch", False):
            loss = float(trainer.callback_metrics.get("train/loss", 0.0))
            if not math.isfinite(loss):
                raise _divergence(trainer, f"train/loss is {loss}")
            return
        loss = float(outputs.get("loss", 0.0)) if isinstance(outputs, dict) else 0.0
        if not trainer.strategy.reduce_boolean_decision(math.isfinite(loss)):
            raise _divergence(trainer, "the training loss is not finite")

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        for name, tensor in checkpoint["state_dict"].items():
            local = to_local(tensor)
            if local.is_floating_point() and not torch.isfinite(local).all():
                raise _divergence(trainer, f"{name} is not finite")


def _divergence(trainer: L.Trainer, problem: str) -> DivergedUserError:
    return DivergedUserError(
        f"{problem} at step {trained_steps(trainer)}: training diverged; lower optimizer.lr or lengthen "
        f"scheduler.warmup; the checkpoints in {trainer.default_root_dir}/checkpoints, if any, are from before"
    )
