"""The loader of a rank for an IterableDataset: each rank reads all samples, and takes its parts of each batch.

So the samples do not depend on the numbers of ranks and workers. A stream that divided itself among the ranks would
save each of them the reading of the others' samples, and would be another experiment on each number of ranks.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from src.engine.determinism.batch import StepParts, as_part
from src.engine.determinism.hashing import hash_ints
from src.engine.determinism.layout import alone
from src.engine.determinism.loader import collate_function, errors_of_workers, worker_options
from src.engine.determinism.sampler import Place
from src.engine.determinism.seeding import are_equal, refuse_draws, seed_generators
from src.engine.utils.errors import UserError

_log = logging.getLogger(__name__)
_PROBED = 4  # samples
_KEPT_STATES = 4  # Lightning fetches a batch or two ahead


class StreamLoader(Place):
    """Yields the batches of a rank from a stream, each as `StepParts`.

    One worker reads the stream if the user's loader has any. A resumed epoch goes on by the `state_dict` of the stream
    if `check` has found it exact; otherwise the samples that are trained already are read and dropped.

    Args:
        loader: the user's loader.
        batch_size: samples of a global batch.
        divide: maps a number of samples to the positions in it of each part of this rank.
        steps: global batches to read; None for all.
        seed: the seed of the run.
        is_divided: whether a global batch has parts of other ranks or micro-batches.
        weight: samples of a part of this rank, relative to their mean over the ranks.
        steps_per_pass: the stream begins again after so many global batches; None for never.
        evaluates: yield each part by itself, and the last samples too if they are fewer than a batch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batch_size: int,
        divide: Callable[[int], Iterable[Tensor]],
        steps: int | None,
        seed: int,
        is_divided: bool = False,
        weight: float = 1.0,
        steps_per_pass: int | None = None,
        evaluates: bool = False,
    ) -> None:
        super().__init__()
        self.loader, self.batch_size, self.divide, self.steps, self.seed = loader, batch_size, divide, steps, seed
        self.is_divided, self.weight, self.evaluates = is_divided, weight, evaluates
        self.steps_per_pass = steps_per_pass
        self.dataset: Any = loader.dataset
        self.sampler = self.batch_sampler = self  # Lightning sets the epoch
        self.state: Any = None  # of the stream at `start`, from a checkpoint
        self.has_exact_state = False
        self._states: dict[int, Any] = {}  # of the stream after each of the last steps

    def __len__(self) -> int:
        if self.steps is None:
            raise TypeError("the length of a stream is not known")
        return self.steps * (len(list(self.divide(self.batch_size))) if self.evaluates else 1)

    def __iter__(self) -> Iterator[StepParts]:
        for step, (parts, state) in enumerate(self._in_worker(self._read), self.start + 1):
            self._states[step] = state
            self._states.pop(step - _KEPT_STATES, None)
            step_parts = StepParts(as_part(places, batch, self.weight) for places, batch in parts)
            yield from (StepParts([part]) for part in step_parts) if self.evaluates else (step_parts,)

    def state_after(self, steps: int) -> Any:
        """Return the state of the stream after so many steps of the epoch; None if it has none that is exact."""
        return self._states.get(steps)

    def check(self, is_shared: bool) -> None:
        """Find out whether the stream repeats itself, and whether its state is exact.

        Args:
            is_shared: whether several ranks read the stream.

        Raises:
            UserError: if these would read different samples.
        """
        ((repeats, self.has_exact_state),) = self._in_worker(self._probe)
        message = (
            f"{type(self.dataset).__name__} yields other samples when it is read again, although torch, NumPy and "
            "Python are seeded alike, so %s would read others: let it draw from their global generators"
        )
        if not repeats and is_shared:
            raise UserError(message % "each process")
        if not repeats:
            _log.warning(message, "a resumed run")

    def _in_worker(self, function: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Yield what a function yields in a worker, or in this process if the user's loader has no workers."""
        workers = min(1, self.loader.num_workers)
        options = worker_options(self.loader, workers)
        with errors_of_workers():
            yield from DataLoader(_Reader(self.dataset, function), None, collate_fn=tuple, **options)

    def _read(self) -> Iterator[tuple[list[Any], Any]]:
        """Yield the parts of each step, as places in the epoch and a batch, and the state of the stream after it."""
        per_pass, state = self.steps_per_pass, self.state if self.start else None
        first = self.start if state is not None else self.start // per_pass * per_pass if per_pass else 0
        for step in count(first) if self.steps is None else range(first, self.steps):
            if step == first or (per_pass and step % per_pass == 0):
                cursor = _Cursor(self.dataset, self.seed, self.epoch, step * self.batch_size, state)
                state = None
            samples = cursor.read(self.batch_size)
            if len(samples) < self.batch_size and not (self.evaluates and samples):
                if self.steps is not None and not self.evaluates:
                    raise UserError(
                        f"{type(self.dataset).__name__} has ended after {step} of {self.steps} batches: correct its "
                        "__len__, or set a smaller trainer.limit_train_batches"
                    )
                return
            if step >= self.start:
                parts = [self._collate(samples, step, part) for part in self.divide(len(samples))]
                yield parts, cursor.stream.state_dict() if self.has_exact_state else None

    def _collate(self, samples: list[Any], step: int, part: Tensor) -> tuple[Tensor, Any]:
        places = step * self.batch_size + part
        seed_generators(int(hash_ints(self.seed, self.epoch, int(places[0]))))
        with refuse_draws("collate_fn", self.is_divided):
            return places, collate_function(self.loader)([samples[position] for position in part.tolist()])

    def _probe(self) -> Iterator[tuple[bool, bool]]:
        """Yield whether the stream repeats itself, and whether its state is exact."""
        has_state = _has_state(self.dataset)
        one, again = _Cursor(self.dataset, self.seed, 0, 0), _Cursor(self.dataset, self.seed, 0, 0)
        first, state = one.read(_PROBED), copy.deepcopy(one.stream.state_dict()) if has_state else None
        rest = one.read(_PROBED)
        repeats = are_equal([first, rest], [again.read(_PROBED), again.read(_PROBED)])
        resumed = _Cursor(self.dataset, self.seed, 0, _PROBED, state) if has_state else None
        yield repeats, resumed is not None and are_equal(rest, resumed.read(_PROBED))


class _Cursor:
    """Reads a stream; the global generators are seeded for each sample.

    Args:
        dataset: the stream.
        seed: the seed of the run.
        epoch: the epoch, which `set_epoch` of the stream gets.
        place: the place of the next sample in the epoch.
        state: the state of the stream at this place.
    """

    def __init__(self, dataset: Any, seed: int, epoch: int, place: int, state: Any = None) -> None:
        self.seed, self.epoch, self.place = seed, epoch, place
        # A stream may be its own iterator, and a state lies in the objects that it is made of.
        self.stream: Any = copy.deepcopy(dataset) if _has_state(dataset) else copy.copy(dataset)
        seed_generators(int(hash_ints(seed, epoch, -1 - place)))
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)
        if state is not None:
            self.stream.load_state_dict(state)
        self._samples = iter(self.stream)

    def read(self, number: int) -> list[Any]:
        """Return the next samples, fewer at the end of the stream."""
        keys = hash_ints(self.seed, self.epoch, torch.arange(self.place, self.place + number)).tolist()
        self.place += number
        samples: list[Any] = []
        for key in keys:
            seed_generators(key)
            samples += islice(self._samples, 1)
        return samples


class _Reader(IterableDataset[Any]):
    """Yields what a function yields; it leaves the global generators alone, and runs in a world of one process."""

    def __init__(self, dataset: Any, function: Callable[[], Iterator[Any]]) -> None:
        self.dataset, self.function = dataset, function

    def __iter__(self) -> Iterator[Any]:
        items = self.function()
        while True:
            with isolate_rng(include_cuda=False), alone():
                item = next(items, None)
            if item is None:
                return
            yield item


def length_of_stream(stream: Any) -> int | None:
    """Return the number of samples of a stream; None if it does not tell."""
    try:
        with alone():
            return len(stream)
    except (TypeError, NotImplementedError):
        return None


def _has_state(stream: Any) -> bool:
    """Return whether a stream has a `state_dict` that takes no arguments."""
    try:
        inspect.signature(stream.state_dict).bind()
    except (AttributeError, TypeError):
        return False
    return hasattr(stream, "load_state_dict")
