"""The order of the samples in an epoch, as a function of (seed, epoch): in any process, as often as asked.

A sampler may have a state, such as a list of batches that it shuffles in place. So each epoch draws from a copy.
"""

import copy
import operator
import random
from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler

from onecurve.data.module_data import as_one_process
from onecurve.errors import UserError
from onecurve.network.object_state import are_equal
from onecurve.random.hashing import hash_ints, permutation
from onecurve.random.seeding import seed_generators

# A generator that is copied would begin anew in each epoch, and hide that nobody seeds it.
_SHARED = (Dataset, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DATASETS = ("data_source", "dataset")  # the names that samplers give theirs, whatever its class
_COMPARED = 16  # epochs; two batches have the same order in one of two
_MOST = 10_000_000  # indices or batches of a sampler without a length; ImageNet has more than a million


def has_batch_sampler(loader: DataLoader[Any]) -> bool:
    """Return whether a `batch_sampler` of the user's gives the batches of a loader."""
    return loader.batch_size is None and loader.batch_sampler is not None


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return what gives a loader its samples, or its batches."""
    return loader.batch_sampler if has_batch_sampler(loader) else loader.sampler


def order_of(loader: DataLoader[Any], seed: int, epoch: int) -> Tensor | list[Tensor]:
    """Return the (n,) indices of an epoch in order, or those of each batch if a `batch_sampler` gives them.

    Shuffling is the project's own. Other samplers draw from torch's global generator, or one of their own, seeded with
    a hash of (seed, epoch); so a weighted sampler, too, has the same order on any hardware and after a restart.
    """
    sampler = sampler_of(loader)
    if _is_shuffling(sampler):
        return permutation(len(sampler.data_source), seed, epoch)[: len(sampler)]
    return draw(_copy(sampler, loader.dataset), seed, epoch, has_batch_sampler(loader))


def _is_shuffling(sampler: Any) -> bool:
    """Return whether a sampler is the one of `shuffle=True`."""
    return type(sampler) is RandomSampler and not sampler.replacement and len(sampler) <= len(sampler.data_source)


def is_repeatable(sampler: Any, seed: int, dataset: Any = None, has_batches: bool = False) -> bool:
    """Return whether (seed, epoch) and the attributes of a sampler determine its epochs.

    A list that is shuffled in place changes, but the global generators give its order. If a sampler changes by itself,
    and its copies do not differ from epoch to epoch, these would hide a generator or a counter of its own.
    """

    def of_epoch(epoch: int) -> Tensor | list[Tensor]:
        return draw(_copy(sampler, dataset), seed, epoch, has_batches)

    if _is_shuffling(sampler):
        return True
    first = of_epoch(0)
    if not are_equal(first, of_epoch(0)):
        return False
    used = _copy(sampler, dataset)
    changes = not are_equal(*(draw(used, seed, 0, has_batches) for _ in range(2)))
    return not changes or any(not are_equal(first, of_epoch(epoch)) for epoch in range(1, _COMPARED))


def draw(sampler: Any, seed: int, epoch: int, has_batches: bool = False) -> Tensor | list[Tensor]:
    """Return the (n,) indices that a sampler yields in an epoch, or those of each batch; its state changes.

    The global generators, and those of torch that it has as `generator`, are seeded for the epoch. As in Lightning, the
    length of a sampler, if it has one, ends an epoch.

    Raises:
        UserError: if the sampler has no end, or yields no indices.
    """
    samplers = _with_inner(sampler)
    for each in samplers:
        if hasattr(each, "set_epoch"):
            each.set_epoch(max(epoch, 0))
    key = int(hash_ints(seed, epoch))
    with isolate_rng(include_cuda=False), as_one_process():  # an iterated sampler may divide itself by rank
        _seed(samplers, key)
        length = length_of(sampler)
        _seed(samplers, key)  # a sampler may draw an epoch to count it
        indices = iter(sampler)
        drawn = list(islice(indices, _MOST if length is None else length))
        if length is None and len(drawn) == _MOST:
            raise UserError(f"{type(sampler).__name__} has no end: give it a __len__, which ends an epoch")
        next(indices, None)  # what a sampler does after its last index, such as counting its epochs
    try:
        return [_indices(batch) for batch in drawn] if has_batches else _indices(drawn)
    except TypeError as error:
        way = "" if has_batches else "give it as batch_sampler if these are batches, and a dataset of samples, or "
        raise UserError(
            f"{type(sampler).__name__} yields what is not the index of a sample ({error}): {way}let it yield "
            "integers, and take what else a sample needs, such as its size, from the dataset"
        ) from None


def _seed(samplers: Iterable[Any], key: int) -> None:
    seed_generators(key)
    for each in samplers:
        if isinstance(getattr(each, "generator", None), torch.Generator):
            each.generator.manual_seed(key)


def length_of(samples: Any) -> int | None:
    """Return the length of a sampler or a stream for one process; None if it does not tell."""
    try:
        with as_one_process():
            return len(samples)
    except (TypeError, NotImplementedError):
        return None


def _indices(drawn: Any) -> Tensor:
    return torch.tensor([operator.index(index) for index in drawn], dtype=torch.int64)  # and no numbers like 1.5


def _copy(sampler: Any, dataset: Any) -> Any:
    """Return a copy of a sampler that shares the dataset and random generators with it."""
    attributes = [item for each in _with_inner(sampler) for item in getattr(each, "__dict__", {}).items()]
    shared = [dataset, *(value for name, value in attributes if isinstance(value, _SHARED) or name in _DATASETS)]
    try:
        return copy.deepcopy(sampler, {id(value): value for value in shared})
    except Exception:  # it has a file, a lock or the like
        return sampler


def _with_inner(sampler: Any) -> tuple[Any, Any]:
    """Return a sampler, and that of a BatchSampler."""
    return sampler, getattr(sampler, "sampler", None)
