"""Count in optimizer steps, on any hardware and after a restart, what Lightning counts in micro-batches."""

from typing import Any

import lightning as L
import torch

from src.engine.determinism.sampler import validation_interval
from src.engine.utils.errors import UserError


class OptimizerSteps(L.Callback):
    """Converts the intervals of validation and schedulers, and makes up for steps of ReduceLROnPlateau.

    Lightning counts micro-batches. It steps ReduceLROnPlateau after an epoch's checkpoint is saved, and not at all
    after the first epoch of a restart (`_FitLoop.on_advance_end` and `_TrainingEpochLoop._update_learning_rates`,
    https://github.com/Lightning-AI/pytorch-lightning/tree/2.6.6/src/lightning/pytorch/loops).
    """

    def __init__(self) -> None:
        self._restored_metrics: dict[str, float] = {}

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if stage == "fit" and data.evaluated_samples("val"):
            may_cross_epochs = trainer.check_val_every_n_epoch is None
            trainer.val_check_interval = validation_interval(
                trainer.val_check_interval, data.steps_per_epoch, data.accumulate, may_cross_epochs
            )

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._restored_metrics = checkpoint.get("metrics", {})

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check that the metric of ReduceLROnPlateau is new whenever it takes a step."""
        every = trainer.check_val_every_n_epoch or 1
        for config in _plateau_configs(trainer):
            if config.monitor.startswith("val") and config.frequency % every:
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
    """Raise a UserError on all ranks if a scheduler has seen different metrics on them. Every rank must call it."""
    scheduler = config.scheduler
    state = torch.tensor([scheduler.best, scheduler.num_bad_epochs], device=device)
    states = trainer.strategy.all_gather(state).view(-1, len(state))
    if (states != states[0]).any():
        raise UserError(
            f"{config.monitor} and so the learning rate differ between the ranks: log it with sync_dist=True"
        )
