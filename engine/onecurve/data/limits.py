"""Limits of steps and samples, in global batches.

Lightning counts its limits in batches of a rank, whose size depends on the number of ranks.
"""

from onecurve.errors import UserError


def apply_limit(option: str, limit: int | float | None, available: int | None, unit: int = 1) -> int | None:
    """Return how many of the `available` steps or samples a limit leaves; None for all of a stream without a length.

    `limit` is a number of units (of `unit` steps or samples), a fraction of `available` from 0 to 1, or None for all.

    Raises:
        UserError: if the limit is no such number, or leaves nothing although it is above 0.
    """
    if limit is None:
        return available
    is_count = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
    is_fraction = isinstance(limit, float) and 0 <= limit <= 1
    if not (is_count or is_fraction):
        raise UserError(f"{option}={limit}: set a number of batches of data.batch_size, or a fraction such as 0.5")
    if available is None:
        if limit < 1 and is_fraction:
            raise UserError(f"{option}={limit}, but a stream has no length: set a number of batches")
        return int(limit) if is_count else None
    count = min(available, int(limit) * unit) if is_count else int(available * limit)
    if limit and available and not count:
        raise UserError(f"{option}={limit} leaves nothing of {available}: set a larger value")
    return count


def total_steps(max_epochs: int | None, max_steps: int, steps_per_epoch: int | None) -> int | None:
    """Return the number of optimizer steps of a run: that of Lightning's limits which ends it first.

    It is None if the length of a stream decides it.
    """
    limits = [max_steps] if max_steps != -1 else []
    if steps_per_epoch is None:
        return min(limits, default=None)
    if max_epochs is not None and max_epochs != -1:
        limits.append(max_epochs * steps_per_epoch)
    return min(limits, default=1000 * steps_per_epoch)
