"""Steps of learning-rate schedulers that do not depend on the hardware or on a restart."""

from typing import Any

import lightning as L
import torch

from src.utils.errors import UserError


class SchedulerSteps(L.Callback):
    """Counts the frequency of a scheduler in optimizer steps, and makes up for the steps that a restart loses.

    Lightning counts micro-batches. It steps ReduceLROnPlateau after an epoch's checkpoint is saved, and not at all
    after the first epoch of a restart (`_FitLoop.on_advance_end` and `_TrainingEpochLoop._update_learning_rates`,
    https://github.com/Lightning-AI/pytorch-lightning/tree/2.6.6/src/lightning/pytorch/loops).
    """

    def __init__(self) -> None:
        self._restored_metrics: dict[str, float] = {}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restored_metrics = checkpoint.get("metrics", {})

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check the metric of ReduceLROnPlateau in a module that was not written for this template.

        Raises:
            UserError: if validation logs other metrics.
        """
        logged = trainer.callback_metrics
        for config in trainer.lr_scheduler_configs:
            monitor = config.monitor or ""
            if config.reduce_on_plateau and logged and monitor.startswith("val") and monitor not in logged:
                raise UserError(
                    f"ReduceLROnPlateau monitors {monitor}, but validation logs {', '.join(logged)}: name one"
                )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the metric of ReduceLROnPlateau is new whenever it takes a step.

        Raises:
            UserError: if there is no validation, or not as often.
        """
        data: Any = trainer.datamodule
        every = trainer.check_val_every_n_epoch or 1
        for config in _plateau_configs(trainer):
            if not config.monitor.startswith("val"):
                continue
            if not data.evaluated_samples("val"):
                raise UserError(f"scheduler.monitor={config.monitor}: the run has no validation; set data.val_fraction")
            if config.frequency % every:
                raise UserError(
                    f"scheduler.frequency={config.frequency}, but validation is every {every} epochs "
                    f"(trainer.check_val_every_n_epoch): set scheduler.frequency={every}"
                )

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = self._restored_metrics | trainer.callback_metrics
        for config in _plateau_configs(trainer):
            is_due = config.scheduler.last_epoch < trainer.current_epoch // config.frequency
            if is_due and config.monitor in metrics:
                pl_module.lr_scheduler_step(config.scheduler, metrics[config.monitor])
            _check_equal_on_ranks(trainer, pl_module.device, config)


def _plateau_configs(trainer: L.Trainer) -> list[Any]:
    configs = trainer.lr_scheduler_configs
    return [config for config in configs if config.reduce_on_plateau and config.interval == "epoch"]


def _check_equal_on_ranks(trainer: L.Trainer, device: torch.device, config: Any) -> None:
    """Check that a scheduler has seen the same metric on all ranks. Every rank must call it.

    Raises:
        UserError: on all ranks, if not: their learning rates would differ.
    """
    scheduler = config.scheduler
    state = torch.tensor([scheduler.best, scheduler.num_bad_epochs], device=device)
    states = trainer.strategy.all_gather(state).view(-1, len(state))
    if (states != states[0]).any():
        raise UserError(
            f"{config.monitor} and so the learning rate differ between the ranks: log it with sync_dist=True"
        )
