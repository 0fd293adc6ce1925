"""The batch that goes from the dataset to the network, with the indices of its samples, and the parts of a step."""

import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onecurve.errors import UserError
from onecurve.network.compilation import device_constant
from onecurve.patches.torch import tree_flatten, tree_unflatten


class Batch(NamedTuple):
    """One process's part of a (micro-)batch of n samples.

    Attributes:
        image: (n, channels, height, width), uint8 until it reaches the device, then normalized floats; or the inputs of
            any other network, (n, ...).
        target: (n,) class indices or, where images are mixed, (n, classes) class probabilities; or any other targets.
        sample_index: (n,) indices that identify the samples, such as those into the dataset before its division into
            splits; -1 for padding.
        weight: (n,) weights of the samples in the loss, which is a weighted sum. On the device they are w/n in
            training, where w is the `weight` of the part, so that the mean of the sums over the ranks is that of the
            samples; in evaluation they are 1, and 0 for padding.
    """

    image: Tensor
    target: Tensor
    sample_index: Tensor
    weight: Tensor


class StepPart(NamedTuple):
    """A part of an optimizer step that a rank computes in a forward and a backward pass of its own.

    Attributes:
        sample_index: (n,) indices that identify the samples.
        batch: what `training_step` takes.
        weight: number of samples, relative to the mean over the parts of all ranks; 1 for a virtual rank.
        size: number of samples; None if only the batch tells, as of one that the dataset has made.
    """

    sample_index: Tensor
    batch: Any
    weight: float = 1.0
    size: int | None = None


class StepParts(list[StepPart]):
    """What a loader yields as one batch of Lightning: this rank's parts of a training step, or one evaluation batch."""

    def map(self, function: Callable[..., Any], *args: Any) -> "StepParts":
        """Return the parts with the batches that a function makes of them."""
        return StepParts(part._replace(batch=function(part, *args)) for part in self)


def as_part(indices: Tensor, batch: Any, weight: float = 1.0, has_any_size: bool = False) -> StepPart:
    """Return a part from (n,) indices in the dataset and their batch, which may have indices of its own.

    A batch that the dataset has made `has_any_size`: another number of samples than of indices.
    """
    if isinstance(batch, Batch):
        return StepPart(batch.sample_index, batch, weight)
    return StepPart(indices, batch, weight, None if has_any_size else len(indices))


def combine(batch: Any) -> StepParts:
    """Return the parts of a step, each with a collection of the batches of several loaders; None if one has ended."""
    of_loaders, structure = tree_flatten(batch)
    if len({part.weight for parts in of_loaders if parts for part in parts}) > 1:
        raise UserError(
            "the loaders of a step divide unevenly among the processes, which have different numbers of samples of one "
            "of its loaders: set batch sizes that divide among them, or bit_exact=true"
        )
    combined = StepParts()
    for parts in zip(*(parts or repeat(None) for parts in of_loaders), strict=False):
        first = next(part for part in parts if part)
        batches = [part.batch if part else None for part in parts]
        combined.append(first._replace(batch=tree_unflatten(batches, structure)))
    return combined


def batch_of_hooks(parts: StepParts, bit_exact: bool, is_divided: bool = False) -> Any:
    """Return what the hooks of a step get: the batch of the first virtual rank, or that of all micro-batches.

    `is_divided` says whether other ranks or micro-batches hold parts of the same global batch.
    """
    batches = [part.batch for part in parts]
    # Lightning would skip the step, on this rank alone.
    if (bit_exact or is_divided) and any(batch is None for batch in batches):
        raise UserError(
            "collate_fn returns None for the samples of a process, micro-batch or virtual rank, and the others train "
            "theirs: leave samples out in the dataset"
        )
    return batches[0] if bit_exact or len(batches) == 1 else join(batches, parts)


def join(batches: Sequence[Any], parts: Sequence[StepPart] = ()) -> Any:
    """Return one batch, or one output, of those of several parts.

    Tensors are concatenated if their shapes allow it, and so are lists with an item for each sample, such as the names
    of files. Scalars are averaged, and other values are listed if they differ.
    """
    return _join(batches, [part.size for part in parts])


def _join(values: Sequence[Any], sizes: Sequence[int | None]) -> Any:
    if sizes and are_lists_of_samples(values, sizes):
        return type(values[0])(item for value in values for item in value)
    children, structures = zip(*(tree_flatten(value, partial(operator.is_not, value)) for value in values), strict=True)
    if any(other != structures[0] for other in structures):
        return list(values)
    if structures[0].is_leaf():
        return _join_leaves(*values)
    return tree_unflatten([_join(several, sizes) for several in zip(*children, strict=True)], structures[0])


def are_lists_of_samples(values: Sequence[Any], sizes: Sequence[int | None]) -> bool:
    """Return whether each value has an item for each sample of its part.

    A list such as [inputs, targets] may be as long by chance. Its items differ in kind, or have rows for the samples.
    """
    if any(type(value) not in (list, tuple) or len(value) != size for value, size in zip(values, sizes, strict=True)):
        return False
    is_one_kind = len({_kind(item) for value in values for item in value}) == 1
    rows = (_has_rows(item, size) for value, size in zip(values, sizes, strict=True) for item in value)
    return is_one_kind and not all(rows)


def _kind(item: Any) -> Any:
    if isinstance(item, Tensor):
        return item.ndim, item.dtype
    return type(item), tuple(item) if isinstance(item, dict) else None


def _has_rows(item: Any, size: int | None) -> bool:
    """Return whether an item has a row for each of so many samples, in all that it consists of."""
    if isinstance(item, Tensor):
        return item.ndim > 0 and len(item) == size
    if isinstance(item, dict):
        return all(_has_rows(value, size) for value in item.values())
    return isinstance(item, list | tuple) and len(item) == size


def _join_leaves(*values: Any) -> Any:
    first = values[0]
    if any(type(value) is not type(first) for value in values):  # such as None, and an array
        return list(values)
    if isinstance(first, Tensor) and first.ndim and all(value.shape[1:] == first.shape[1:] for value in values):
        return torch.cat(values)
    if isinstance(first, Tensor) and first.ndim == 0 and first.is_floating_point():
        return torch.stack(values).mean()
    is_shared = isinstance(first, str | int | float | None) and all(value == first for value in values)
    return first if is_shared else list(values)


@device_constant
def constant_weights(count: int, weight: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (count,) equal weights of samples."""
    return torch.full((count,), weight, dtype=dtype, device=device)
