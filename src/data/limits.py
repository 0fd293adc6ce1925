"""Limits of `trainer`, counted in what does not depend on the hardware: steps to train, samples to evaluate.

Lightning counts micro-batches, whose size depends on the number of ranks and on accumulation.
"""

from src.errors import UserError


def limited(option: str, limit: int | float | None, available: int, unit: int = 1) -> int:
    """Return how much of what is `available` a limit leaves.

    Args:
        option: the name of the limit, for errors.
        limit: a whole number of units, a fraction of what is available, or None for all of it.
        available: steps or samples.
        unit: what the limit counts in: steps or samples per batch.

    Raises:
        UserError: if the limit is neither, or a fraction that leaves nothing.
    """
    if limit is None:
        return available
    is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
    is_fraction = isinstance(limit, float) and 0 <= limit <= 1
    if not (is_count or is_fraction):
        raise UserError(f"{option}={limit}: give a number of batches of data.batch_size, or a fraction such as 0.5")
    left = min(available, int(limit) * unit) if is_count else int(available * limit)
    if limit and available and not left:
        raise UserError(f"{option}={limit} leaves nothing of {available}: give more")
    return left


def validation_interval(interval: int | float, steps_per_epoch: int, accumulate: int, crosses: bool) -> int | float:
    """Return `trainer.val_check_interval`, given in steps or as a fraction of an epoch, in micro-batches.

    Args:
        interval: as configured.
        steps_per_epoch: optimizer steps of an epoch.
        accumulate: micro-batches of a step.
        crosses: whether the interval may be longer than an epoch, as check_val_every_n_epoch=null says.

    Raises:
        UserError: if it is longer than an epoch otherwise.
    """
    if isinstance(interval, float) and interval >= 1:
        return interval  # the end of an epoch, or something that Lightning refuses
    steps = interval if isinstance(interval, int) else max(1, int(steps_per_epoch * interval))
    if steps > steps_per_epoch and not crosses:
        raise UserError(
            f"trainer.val_check_interval={interval} exceeds the {steps_per_epoch} steps of an epoch: "
            "give less, or set trainer.check_val_every_n_epoch=null"
        )
    return steps * accumulate
