"""Steps of learning-rate schedulers that do not depend on the hardware or on a restart."""

from typing import Any

import lightning as L


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

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = self._restored_metrics | trainer.callback_metrics
        for config in trainer.lr_scheduler_configs:
            if not config.reduce_on_plateau or config.interval != "epoch" or config.monitor not in metrics:
                continue
            if config.scheduler.last_epoch < trainer.current_epoch // config.frequency:
                pl_module.lr_scheduler_step(config.scheduler, metrics[config.monitor])
