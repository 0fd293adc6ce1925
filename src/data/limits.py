"""Sizes that do not depend on the hardware: steps to train, samples to evaluate, the global batch.

Lightning counts its limits in micro-batches, whose size depends on the number of ranks and on accumulation.
"""

from src.utils.errors import UserError


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


def check_global_batch(batch: int, dp_size: int, micro_batches: int, samples: int, mixes: bool) -> None:
    """Find out whether a global batch divides over the data-parallel ranks and their micro-batches.

    Args:
        batch: samples per optimizer step.
        dp_size: data-parallel ranks.
        micro_batches: of each rank, accumulated ones and those of a pipeline.
        samples: to train on.
        mixes: whether the samples of a micro-batch are mixed in pairs.

    Raises:
        UserError: if it does not divide, or there are fewer samples.
    """
    parts = dp_size * micro_batches
    if batch % parts:
        below = batch // parts * parts
        sizes = f"{below} or {below + parts}" if below else f"{parts}"
        raise UserError(
            f"data.batch_size={batch} does not divide over {dp_size} data-parallel processes"
            f"{f' x {micro_batches} micro-batches' if micro_batches > 1 else ''}: "
            f"set data.batch_size={sizes}, or change trainer.devices"
            f"{' or the number of micro-batches' if micro_batches > 1 else ''}"
        )
    if mixes and batch // parts % 2:
        raise UserError(
            f"data.augment.mixup and cutmix pair the samples of a device, and {batch // parts} is odd: "
            f"set data.batch_size={batch + parts}, or change trainer.devices"
        )
    if batch > samples:
        raise UserError(f"data.batch_size={batch} exceeds the {samples} images to train on")
