"""Save the position in the data with every checkpoint, and restore Lightning's loops to it."""

import math
from typing import Any

import lightning as L

from src.data.limits import validation_interval
from src.utils.errors import UserError


class DataPosition(L.Callback):
    """Saves the position as an epoch and the samples trained in it, and resumes there at any world size.

    Lightning stores the values that its loop counters have while a hook runs. They count micro-batches, whose number
    depends on the accumulation. This callback derives all counters from the samples trained: at whatever moment the
    checkpoint was written, the loops are restored to the start of the first step that is not complete.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Convert `val_check_interval` from optimizer steps to micro-batches, which Lightning counts."""
        data: Any = trainer.datamodule
        if stage == "fit" and data.evaluated_samples("val"):
            may_cross_epochs = trainer.check_val_every_n_epoch is None
            trainer.val_check_interval = validation_interval(
                trainer.val_check_interval, data.steps_per_epoch, data.accumulate, may_cross_epochs
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Make the test log at the last step and epoch, also if training stopped early or did not run."""
        data: Any = trainer.datamodule
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        epochs = math.ceil(trainer.global_step / data.steps_per_epoch)
        trainer.fit_loop.epoch_progress.current.completed = epochs

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        data: Any = trainer.datamodule
        micro_batches = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        epoch, micro_batches_in_epoch = divmod(micro_batches, data.steps_per_epoch * data.accumulate)
        steps = micro_batches_in_epoch // data.accumulate  # a step that is accumulated in part is repeated
        samples = steps * data.global_batch_size
        checkpoint["position"] = {"epoch": epoch, "samples": samples}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Rewind the saved loops, from which Lightning restores its own afterwards.

        Raises:
            UserError: if the checkpoint is beyond `max_epochs`.
        """
        data: Any = trainer.datamodule
        if not trainer.training:
            return
        position = checkpoint["position"]
        epoch, samples = position["epoch"], position["samples"]
        if trainer.max_epochs not in (None, -1) and epoch > trainer.max_epochs:
            raise UserError(
                f"trainer.max_epochs={trainer.max_epochs}: the run in ckpt_path has already trained {epoch} epochs; "
                "set it higher, or evaluate the run with fit=false"
            )
        data.resume_at = (epoch, samples)
        steps = samples // data.global_batch_size
        micro_batches = steps * data.accumulate
        loops = checkpoint["loops"]["fit_loop"]
        total_steps = epoch * data.steps_per_epoch + steps
        _rewind(loops, epoch, micro_batches, total=total_steps * data.accumulate)
        # Lightning counts the last step itself.
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = total_steps - 1


def _rewind(loops: dict[str, Any], epoch: int, micro_batch: int, total: int) -> None:
    """Set the saved counters to the state before a micro-batch.

    An epoch that is ready but not started is the only state from which Lightning calls `on_train_epoch_start`, keeps
    the count of batches and does not repeat a validation. `total.completed`, which nothing else reads, lags by two so
    that none of Lightning's special cases for a restart inside a hook applies.

    Args:
        loops: state of the fit loop in a checkpoint, changed in place.
        epoch: epoch of the micro-batch, from zero.
        micro_batch: number of the micro-batch in its epoch, from zero.
        total: number of the micro-batch in the run, from zero.
    """
    loops["epoch_progress"] = _progress(epoch, ready=epoch + 1)
    loops["epoch_loop.batch_progress"] = {
        "total": _counts(total) | {"completed": total - 2},
        "current": _counts(micro_batch),
        "is_last_batch": False,
    }
    loops["epoch_loop.val_loop.batch_progress"] = _progress(0) | {"is_last_batch": False}


def _counts(value: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), value)


def _progress(value: int, **changes: int) -> dict[str, Any]:
    return {"total": _counts(value) | changes, "current": _counts(value) | changes}
