"""Micro-batches of a batch: sample i belongs to micro-batch i % microbatches (`src/data/sampler.py`)."""

from torch import Tensor

from src.data.batch import Batch


def split_samples(values: Tensor, microbatches: int) -> Tensor:
    """Return the (samples, ...) values of a batch as a (microbatches, n, ...) view."""
    return values.unflatten(0, (-1, microbatches)).transpose(0, 1)


def split_batch(batch: Batch, microbatches: int) -> Batch:
    """Return the batch with (microbatches, n, ...) fields."""
    return Batch(*(split_samples(field, microbatches) for field in batch))


def join_samples(values: Tensor) -> Tensor:
    """Undo `split_samples`: return (microbatches, n, ...) values in the order of the batch, (samples, ...)."""
    return values.transpose(0, 1).flatten(0, 1)
