"""The loader of a rank for an IterableDataset: each rank reads all samples, and takes its parts of each batch.

So the samples do not depend on the numbers of ranks and workers. A stream that divided itself among the ranks would
save each of them the reading of the others' samples, and would be another experiment on each number of ranks.
"""

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from onecurve.checkpoint.io import is_plain
from onecurve.data.batch import StepParts, as_part
from onecurve.data.module_data import as_one_process
from onecurve.data.rank_batches import EpochStart
from onecurve.data.rank_loader import collate_function, disables_batching, errors_of_workers, worker_options
from onecurve.errors import UserError
from onecurve.network.object_state import are_equal, attributes_of, digest_of, is_dense, walk
from onecurve.network.tensors import to_local
from onecurve.process.gather import gather_objects
from onecurve.random.hashing import hash_ints
from onecurve.random.seeding import FETCHING, refuse_draws, seed_generators

_log = logging.getLogger(__name__)
_PROBED = 4  # samples
_KEPT_STATES = 4  # Lightning fetches a batch or two ahead
_HASHED = 256  # keys that are computed at once
_EARLY = 8  # batches, after which training may have changed what the stream holds
_COUNTED = 1_000_000  # objects, in some 0.2 seconds


@dataclass(eq=False)
class StreamLoader(EpochStart):
    """Yields the batches of a rank from a stream, each as `StepParts`.

    One worker reads the stream. A resumed epoch goes on by the `state_dict` of the stream if that is exact; otherwise
    the samples that are trained already are read and dropped.

    Args:
        batch_size: samples of a global batch.
        divide: maps a number of samples to the positions in it of each part of this rank.
        steps: global batches to read; None for all.
        is_divided: whether a global batch has parts of other ranks or micro-batches.
        weight: samples of a part of this rank, relative to their mean over the ranks.
        steps_per_pass: the stream begins again after so many global batches; None for never.
        evaluates: yield each part by itself, and the last samples too if they are fewer than a batch, unless the loader
            drops them.
        has_exact_state: whether the stream goes on from its state.
    """

    loader: DataLoader[Any]
    batch_size: int
    divide: Callable[[int], Iterable[Tensor]]
    steps: int | None
    seed: int
    is_divided: bool = False
    weight: float = 1.0
    steps_per_pass: int | None = None
    evaluates: bool = False
    has_exact_state: bool = False

    def __post_init__(self) -> None:
        self.dataset: Any = self.loader.dataset
        self.sampler = self.batch_sampler = self  # Lightning sets the epoch
        self.checked = math.inf  # global batches to yield: those of a sanity check
        self.state: Any = None  # of the stream at `start`, from a checkpoint
        self.states: dict[int, Any] = {}  # after each of the last steps of the epoch, if the stream has exact ones

    def set_epoch(self, epoch: int) -> None:
        if not self.evaluates:  # evaluations draw the same numbers in each epoch, and after a fit
            super().set_epoch(epoch)

    def __len__(self) -> int:
        steps = min(math.inf if self.steps is None else self.steps, self.checked)
        if steps == math.inf:
            raise TypeError("the length of a stream is not known")
        return int(steps) * (len(list(self.divide(self.batch_size))) if self.evaluates else 1)

    def __iter__(self) -> Iterator[StepParts]:
        held = _held(self.dataset) if self.epoch == 0 and not self.evaluates else None
        steps = _in_worker(self.loader, self._read, self.seed, self.epoch)
        for step, (parts, state) in enumerate(steps, self.start + 1):
            if step > self.checked:
                return
            if step == self.start + _EARLY:
                held = self._name_changes(held)
            self.states[step] = state
            self.states.pop(step - _KEPT_STATES, None)
            has_any_size = disables_batching(self.loader)
            step_parts = StepParts(as_part(places, batch, self.weight, has_any_size) for places, batch in parts)
            yield from (StepParts([part]) for part in step_parts) if self.evaluates else (step_parts,)
        self._name_changes(held)

    def _name_changes(self, held: tuple[int, float] | None) -> tuple[int, float] | None:
        """Warn if training has changed what the stream held, and return what is to be compared later."""
        if held is None or _held(self.dataset) == held:
            return held
        _log.warning(
            "training has changed %s while a worker read it: each epoch reads what it held at its start, so a replay "
            "buffer or a policy is an epoch behind, and what reading changes, such as an environment or counts, begins "
            "anew; a map-style dataset with num_workers=0 is read by this process",
            type(self.dataset).__name__,
        )
        return None

    def _read(self) -> Iterator[tuple[list[Any], Any]]:
        """Yield the parts of each step, as places in the epoch and a batch, and the state of the stream after it."""
        per_pass = self.steps_per_pass
        first = self.start - self.start % per_pass if per_pass else 0  # of the pass in which the run goes on
        state = self.state if self.start > first else None
        first = first if state is None else self.start
        keeps_rest = self.evaluates and not self.loader.drop_last
        for step in count(first) if self.steps is None else range(first, self.steps):
            if step == first or (per_pass and step % per_pass == 0):
                reader = _seeded_samples(self.dataset, self.seed, self.epoch, step * self.batch_size, state)
                state = None
            samples = list(islice(reader, self.batch_size))
            if len(samples) < self.batch_size and not (keeps_rest and samples):
                if self.steps is not None and not self.evaluates:
                    raise UserError(
                        f"{type(self.dataset).__name__} has ended after {step} of {self.steps} batches: correct its "
                        "__len__, or set a smaller trainer.limit_train_batches"
                    )
                return
            if step >= self.start:
                parts = [self._collate(samples, step, part) for part in self.divide(len(samples))]
                yield parts, copy.deepcopy(self.dataset.state_dict()) if self.has_exact_state else None

    def _collate(self, samples: list[Any], step: int, part: Tensor) -> tuple[Tensor, Any]:
        places = step * self.batch_size + part
        seed_generators(int(hash_ints(hash_ints(self.seed, self.epoch, int(places[0]), FETCHING))))
        with refuse_draws("collate_fn", self.is_divided):
            return places, collate_function(self.loader)([samples[position] for position in part.tolist()])


def examine(loader: DataLoader[Any], seed: int) -> tuple[str | None, bool]:
    """Read the first samples of a stream several times. Every rank must call it.

    Returns:
        A hash of the samples, None if they are others each time; and whether the stream goes on from its `state_dict`
        with the same samples.

    Raises:
        UserError: if the ranks read different samples.
    """
    probe = partial(_probe, loader.dataset, seed)
    ((first, state, second),) = _in_worker(loader, probe, seed)
    ((again, _, second_again),) = _in_worker(loader, probe, seed)
    has_exact_state = False
    if state is not None:
        ((resumed, *_),) = _in_worker(loader, partial(probe, _PROBED, state), seed)
        has_exact_state = are_equal(second, resumed) and is_plain(state)
    digest = digest_of([first, second])
    message = (
        f"{type(loader.dataset).__name__} yields other samples when it is read again, although torch, NumPy and "
        "Python are seeded alike, so %s would read others: let it draw from their global generators"
    )
    if len(set(gather_objects(digest))) > 1:
        raise UserError(message % "each process")
    if not are_equal([first, second], [again, second_again]):
        _log.warning(message, "a resumed run")
        return None, has_exact_state
    return digest, has_exact_state


def _probe(dataset: Any, seed: int, place: int = 0, state: Any = None) -> Iterator[tuple[list[Any], Any, list[Any]]]:
    """Yield some samples, the state of the stream after them, and the samples that follow."""
    reader = _seeded_samples(dataset, seed, 0, place, state)
    first = list(islice(reader, _PROBED))
    after = copy.deepcopy(dataset.state_dict()) if _has_state(dataset) else None
    yield first, after, list(islice(reader, _PROBED))


def _in_worker(
    loader: DataLoader[Any], function: Callable[[], Iterator[Any]], seed: int, epoch: int = 0
) -> Iterator[Any]:
    """Yield what a function yields in a new worker, which leaves the stream of this process as it is."""
    reader, options = _Reader(loader.dataset, function), worker_options(loader, 1, seed, epoch)
    with errors_of_workers():
        yield from DataLoader(reader, batch_size=None, collate_fn=tuple, pin_memory=loader.pin_memory, **options)


def _seeded_samples(dataset: Any, seed: int, epoch: int, place: int, state: Any = None) -> Iterator[Any]:
    """Read a stream from a place in the epoch, at which it has a state; the global generators are seeded for each."""
    seed_generators(int(hash_ints(seed, epoch, -1 - place)))
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    if state is not None:
        dataset.load_state_dict(state)
    samples = iter(dataset)
    for first in count(place, _HASHED):
        for key in hash_ints(seed, epoch, torch.arange(first, first + _HASHED), FETCHING).tolist():
            seed_generators(key)
            try:
                yield next(samples)
            except StopIteration:
                return


@dataclass(eq=False)
class _Reader(IterableDataset[Any]):
    """Yields what a function yields, in a world of one process."""

    dataset: Any
    function: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        with as_one_process():
            yield from self.function()


def _held(stream: Any) -> tuple[int, float]:
    """Return the number of objects that a stream holds, up to a bound, as it may hold its samples; sums of weights.

    A stream that reads a function of a module, such as one that plays with its policy, holds this module.
    """
    values = attributes_of(stream).values()
    owners = [value.__self__ for value in values if isinstance(value, MethodType)]
    number, weights = 0, 0.0
    for one in islice(walk([*values, *owners], opens_modules=True), _COUNTED):
        number += 1
        if isinstance(one, nn.Parameter) and is_dense(one):
            weights += to_local(one.detach()).sum(dtype=torch.float32).item()  # no copy of the weight
    return number, weights


def _has_state(stream: Any) -> bool:
    """Return whether a stream has a `state_dict` that takes no arguments."""
    try:
        inspect.signature(stream.state_dict).bind()
    except (AttributeError, TypeError):
        return False
    return hasattr(stream, "load_state_dict")
