"""Limits that do not depend on the hardware: training steps and evaluated samples.

Lightning counts its limits in micro-batches, whose size depends on the number of ranks and on accumulation.
"""

from src.engine.utils.errors import UserError


def apply_limit(option: str, limit: int | float | None, available: int, unit: int = 1) -> int:
    """Return how many of the `available` steps or samples a limit leaves.

    Args:
        option: the name of the option, for error messages.
        limit: an integer number of units, a fraction of `available` from 0 to 1, or None for no limit.
        available: the number of steps or samples.
        unit: the number of steps or samples in one unit of an integer limit.

    Raises:
        UserError: if the limit is no such number, or leaves nothing although it is above 0.
    """
    if limit is None:
        return available
    is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
    is_fraction = isinstance(limit, float) and 0 <= limit <= 1
    if not (is_count or is_fraction):
        raise UserError(f"{option}={limit}: set a number of batches of data.batch_size, or a fraction such as 0.5")
    count = min(available, int(limit) * unit) if is_count else int(available * limit)
    if limit and available and not count:
        raise UserError(f"{option}={limit} leaves nothing of {available}: set a larger value")
    return count


def total_steps(max_epochs: int | None, max_steps: int, steps_per_epoch: int) -> int:
    """Return the number of optimizer steps of a run: that of Lightning's limits which ends it first."""
    limits = [max_steps] if max_steps != -1 else []
    if max_epochs is not None and max_epochs != -1:
        limits.append(max_epochs * steps_per_epoch)
    return min(limits, default=1000 * steps_per_epoch)


def validation_interval(
    interval: int | float, steps_per_epoch: int, accumulate: int, may_exceed_epoch: bool
) -> int | float:
    """Return `trainer.val_check_interval` in micro-batches, the unit in which Lightning counts it.

    Args:
        interval: the configured interval, in optimizer steps or as a fraction of an epoch.
        steps_per_epoch: optimizer steps per epoch.
        accumulate: micro-batches per optimizer step.
        may_exceed_epoch: whether the interval may be longer than an epoch, which check_val_every_n_epoch=null allows.

    Raises:
        UserError: if the interval is longer than an epoch and `may_exceed_epoch` is false.
    """
    if isinstance(interval, float) and interval >= 1:
        return interval  # 1.0 is the end of an epoch, and Lightning refuses any larger float
    steps = interval if isinstance(interval, int) else max(1, int(steps_per_epoch * interval))
    if steps > steps_per_epoch and not may_exceed_epoch:
        raise UserError(
            f"trainer.val_check_interval={interval} exceeds the {steps_per_epoch} steps of an epoch: "
            "set a smaller value, or trainer.check_val_every_n_epoch=null"
        )
    return steps * accumulate
