"""Checks of schedules, of the interval of validation, and of the metrics that schedules and callbacks follow."""

import logging
from typing import Any

import lightning as L
from torch.optim.lr_scheduler import OneCycleLR

from onecurve.errors import UserError
from onecurve.process.gather import names_that_differ

_log = logging.getLogger(__name__)


class ScheduleCheck(L.Callback):
    """Refuses schedules, intervals of validation, and metrics to follow that do not fit the run.

    A sanity check shows whether the metrics that the user's callbacks monitor exist, which Lightning asks after an
    epoch.
    """

    _are_compared = True  # outside of a fit, nothing follows a metric

    def __init__(self, callbacks: dict[str, L.Callback]) -> None:
        self._monitors = {name: str(one.monitor) for name, one in callbacks.items() if getattr(one, "monitor", None)}
        self._after_validation = {name for name in self._monitors if _acts_after_validation(callbacks[name])}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if stage != "fit" or not data.evaluates("val") or trainer.check_val_every_n_epoch is None:
            return
        interval, steps = trainer.val_check_interval, data.steps_per_epoch
        if isinstance(interval, int) and steps is not None and interval > steps:
            problem = f"trainer.val_check_interval={interval} exceeds the {steps} steps of an epoch"
            raise UserError(f"{problem}: set a smaller value, or trainer.check_val_every_n_epoch=null")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuse a OneCycleLR that ends too early, and a ReduceLROnPlateau that steps without a new value."""
        data: Any = trainer.datamodule
        for config in trainer.lr_scheduler_configs if data.steps_per_epoch else ():
            epochs = -(-data.total_steps // data.steps_per_epoch)
            steps = (data.total_steps if config.interval == "step" else epochs) // config.frequency
            if isinstance(config.scheduler, OneCycleLR) and config.scheduler.total_steps < steps:
                problem = f"make {steps} steps of OneCycleLR, which ends after {config.scheduler.total_steps}"
                way_out = "give it total_steps=trainer.estimated_stepping_batches"
                if trainer.ckpt_path:
                    way_out = "set them as in that run, or begin another schedule with its weights by init_from"
                raise UserError(f"trainer.max_epochs and max_steps {problem}: {way_out}")
        every = trainer.check_val_every_n_epoch or 1
        for config in plateau_configs(trainer):
            if config.monitor.startswith("val") and config.frequency % every:
                raise UserError(
                    f"scheduler.frequency={config.frequency}, but validation is every {every} epochs "
                    f"(trainer.check_val_every_n_epoch): set scheduler.frequency={every}"
                )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        monitors = dict(self._monitors)
        for config in plateau_configs(trainer):
            monitors |= {"ReduceLROnPlateau": config.monitor} if config.strict else {}
        self._of_validation = {name: monitor for name, monitor in monitors.items() if monitor.startswith("val")}
        self._are_compared = False
        if not trainer.datamodule.evaluates("val"):
            if monitor := self._of_validation.get("ReduceLROnPlateau"):
                problem = f"ReduceLROnPlateau monitors {monitor}, but the run has no validation"
                raise UserError(f"{problem}: give it validation data, or let it monitor a metric of training")
            if waiting := sorted({*self._of_validation, *self._after_validation}):
                _log.warning("the run has no validation, so %s cannot act", " and ".join(waiting))
        known = {"val/loss", "val/acc"} if getattr(pl_module, "takes_batch", False) else set()  # of this template
        if not known.issuperset(self._of_validation.values()):
            trainer.num_sanity_val_steps = trainer.num_sanity_val_steps or 1

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        logged = trainer.callback_metrics
        for name, monitor in self._of_validation.items():
            # A module may log nothing in the sanity check, and Lightning does not show what single loaders have.
            if logged and monitor not in logged and "/dataloader_idx_" not in monitor:
                raise UserError(
                    f"{name} monitors {monitor}, which validation does not log (it logs {', '.join(logged)}): "
                    "set its `monitor` to one of these, and its `mode` to min if less is better"
                    + (f"; or {name}=null" if "." in name else "")
                )

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare the ranks at the sanity check, which a run that goes on does not have, or at its first validation."""
        if self._are_compared:
            return
        self._are_compared, logged = True, trainer.callback_metrics
        monitors = self._of_validation.values()  # a rank that has not logged one differs as well
        own = {monitor: float(logged[monitor]) if monitor in logged else None for monitor in monitors}
        differing = names_that_differ(own)
        for name in [name for name, monitor in self._of_validation.items() if monitor in differing]:
            problem = f"{name} monitors {self._of_validation[name]}, which each rank has of its own samples"
            if name == "ReduceLROnPlateau":  # of each rank
                raise UserError(f"{problem}: log it with sync_dist=True")
            _log.warning("%s: log it with sync_dist=True, or it follows rank zero's", problem)


def plateau_configs(trainer: L.Trainer) -> list[Any]:
    """Return the schedules that Lightning steps once per epoch, by a metric."""
    configs = trainer.lr_scheduler_configs
    return [config for config in configs if config.reduce_on_plateau and config.interval == "epoch"]


def _acts_after_validation(callback: Any) -> bool:
    """Return whether EarlyStopping or ModelCheckpoint is set to act there only, whatever metric it monitors."""
    return any(getattr(callback, f"_{act}_on_train_epoch_end", None) is False for act in ("check", "save"))
