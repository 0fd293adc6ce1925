"""Save the position in the data with every checkpoint, and restore Lightning's loops to it."""

import hashlib
from typing import Any

import lightning as L

from src.data.limits import validation_interval
from src.utils.errors import UserError


class DataPosition(L.Callback):
    """Saves the position as (epoch, samples of it trained) and resumes there at any world size.

    Lightning stores its loop counters as they happen to be while a hook runs, and counts micro-batches, whose
    number another accumulation would change. Here both are derived from the samples trained: whatever moment the
    checkpoint was written at, the loops are restored to the start of the first step that was not yet done.
    """

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if stage == "fit" and data.evaluated_samples("val"):
            steps, crosses = data.steps_per_epoch, trainer.check_val_every_n_epoch is None
            interval = validation_interval(trainer.val_check_interval, steps, data.accumulate, crosses)
            trainer.val_check_interval = interval

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let the test log at the last step and epoch, also if training stopped early or did not run."""
        data: Any = trainer.datamodule
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step
        trainer.fit_loop.epoch_progress.current.completed = -(-trainer.global_step // data.steps_per_epoch)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        data: Any = trainer.datamodule
        trained = trainer.fit_loop.epoch_loop.batch_progress.total.processed
        epoch, micro_batches = divmod(trained, data.micro_batches_per_epoch)
        samples = micro_batches // data.accumulate * data.global_batch_size  # a step half accumulated is done again
        checkpoint["position"] = {"epoch": epoch, "samples": samples, "order": _order_settings(data)}

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        data: Any = trainer.datamodule
        if not trainer.training:
            return
        position, order = checkpoint["position"], _order_settings(data)
        for name, before in position["order"].items():
            if order.get(name, before) != before:  # an older checkpoint may have had other names
                raise UserError(
                    f"the run in ckpt_path had {name}={before}, this one has {order[name]}: "
                    "that is another experiment; set it back, or start a new run"
                )
        data.resume_at = (position["epoch"], position["samples"])
        steps = position["samples"] // data.global_batch_size
        loops, batches = checkpoint["loops"]["fit_loop"], steps * data.accumulate
        _rewind(loops, position["epoch"], batches, position["epoch"] * data.micro_batches_per_epoch + batches)
        done = position["epoch"] * data.steps_per_epoch + steps
        loops["epoch_loop.state_dict"]["_batches_that_stepped"] = done - 1  # Lightning counts the last step itself


def _order_settings(data: Any) -> dict[str, int | str]:
    """Return the settings that determine the global batches. A position is valid only if they are unchanged."""
    indices = data.splits["train"].indices
    return {
        "data.batch_size": data.global_batch_size,
        "seed": data.seed,
        "training images": len(indices),
        "training indices (SHA-256)": hashlib.sha256(indices.cpu().numpy().tobytes()).hexdigest()[:16],
        "steps per epoch": data.steps_per_epoch,
    }


def _rewind(loops: dict[str, Any], epoch: int, current: int, total: int) -> None:
    """Write the counters of a run that is about to start micro-batch `current` of `epoch`, its `total`-th of all.

    An epoch that is ready but not started is the one state from which Lightning calls `on_train_epoch_start`, keeps
    the count of batches and runs no validation twice. `total.completed`, which nothing else reads, lags by two so
    that no special case of restarting inside a hook applies.
    """
    loops["epoch_progress"] = _progress(epoch, ready=epoch + 1)
    batches = {"total": _counts(total) | {"completed": total - 2}, "current": _counts(current), "is_last_batch": False}
    loops["epoch_loop.batch_progress"] = batches
    loops["epoch_loop.val_loop.batch_progress"] = _progress(0) | {"is_last_batch": False}


def _counts(value: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), value)


def _progress(value: int, **changes: int) -> dict[str, Any]:
    return {"total": _counts(value) | changes, "current": _counts(value) | changes}
