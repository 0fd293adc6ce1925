"""The scheduler of an optimizer: from a schedule of this template, or any class of torch.optim.lr_scheduler."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from src.engine.optim.groups import override_hyperparameters
from src.engine.optim.schedules import Schedule, lr_lambdas, lr_multiplier, unwrap_partial
from src.engine.utils.errors import UserError, check_choice


@dataclass
class TorchSchedule:
    """A scheduler of torch, and when it takes a step.

    Args:
        scheduler: builds the scheduler for an optimizer.
        interval: `epoch` or `step`: the optimizer step.
        frequency: intervals between two steps of the scheduler; each epoch counts its optimizer steps from one.
        monitor: metric for ReduceLROnPlateau.
    """

    scheduler: partial[LRScheduler]
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None

    def __post_init__(self) -> None:
        check_choice("scheduler.interval", self.interval, ("epoch", "step"))


def as_torch_schedule(schedule: Schedule | TorchSchedule | partial[Any]) -> TorchSchedule | None:
    """Return the schedule if it is one of torch, or None if it is a function of (step, steps of the run)."""
    if isinstance(schedule, TorchSchedule):
        return schedule
    built = unwrap_partial(schedule)
    if isinstance(built, partial) and isinstance(built.func, type) and issubclass(built.func, LRScheduler):
        return TorchSchedule(built, monitor="val/loss")
    return None


def scheduler_config(optimizer: Optimizer, schedule: Any, steps: int) -> dict[str, Any]:
    """Return the scheduler in the form of Lightning's `configure_optimizers`.

    Args:
        optimizer: optimizer.
        schedule: function of (step, steps of the run), TorchSchedule, or a partial of a scheduler class of torch.
        steps: steps of the run.

    Raises:
        UserError: if the scheduler refuses its arguments, or the optimizer needs a schedule of this template.
    """
    torch_schedule = as_torch_schedule(schedule)
    if torch_schedule is None:
        plain = unwrap_partial(schedule)
        lambdas = lr_lambdas(optimizer, lambda group, step: lr_multiplier(plain, group, step, steps))
        return {"scheduler": LambdaLR(optimizer, lambdas), "interval": "step"}
    if any(group.get("schedule_fraction", 1.0) != 1.0 for group in optimizer.param_groups):
        raise UserError(
            "optimizer.whitening_fraction needs a schedule of conf/scheduler: set it to 1.0, or use one_cycle"
        )
    try:
        scheduler = unwrap_partial(torch_schedule.scheduler)(optimizer)
    except (TypeError, ValueError) as error:
        raise UserError(f"scheduler={torch_schedule.scheduler.func.__name__}: {error}") from error
    return {
        "scheduler": scheduler,
        "interval": torch_schedule.interval,
        "frequency": torch_schedule.frequency,
        "monitor": torch_schedule.monitor,
    }


def keep_configured_rates(checkpoint: dict[str, Any], configured: Any, schedule: Any, steps: int) -> None:
    """Let a continued run use the configured hyper-parameters instead of those in its checkpoint.

    A scheduler of torch may have changed any of them, so that those of the checkpoint stay.

    Args:
        checkpoint: checkpoint of a LightningModule, changed in place.
        configured: what the module's `configure_optimizers` returns now.
        schedule: as in `scheduler_config`.
        steps: steps of the run.

    Raises:
        UserError: if the checkpoint has another kind of optimizer or scheduler.
    """
    optimizer, scheduler = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    saved_kind = checkpoint.get("scheduler", "LambdaLR")  # earlier versions had no other
    if saved_kind != type(scheduler).__name__:
        raise UserError(f"ckpt_path is a run with another kind of `scheduler` ({saved_kind}): set it as in that run")
    if as_torch_schedule(schedule):
        return
    step, saved = checkpoint["global_step"], checkpoint["optimizer_states"][0]
    override_hyperparameters(saved, optimizer, lambda group: lr_multiplier(schedule, group, step, steps))
    # The scheduler takes the learning rates from the configuration, not from the checkpoint.
    for key in ("base_lrs", "_last_lr"):
        checkpoint["lr_schedulers"][0].pop(key)
