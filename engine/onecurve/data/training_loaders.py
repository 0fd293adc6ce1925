"""The loaders of the training data: each is divided alike into the parts of a step, whatever kind of loader it is."""

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from itertools import repeat, zip_longest
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from onecurve.data.batch import StepParts
from onecurve.data.batch_samplers import TrainingBatches, apply_limit, limit_without_length
from onecurve.data.layout import Division
from onecurve.data.loader import (
    Loaders,
    RankLoader,
    check_repeatable,
    examples,
    has_given_batches,
    order_of,
    yields_batches,
)
from onecurve.data.streams import StreamLoader, examine, length_of_stream
from onecurve.errors import UserError
from onecurve.patches.torch import TreeSpec, tree_unflatten
from onecurve.random.hashing import hash_ints

_OPTION = "trainer.limit_train_batches"


class TrainingLoaders:
    """The training loaders of a run: one, or a collection of several that a step takes a batch of each.

    Args:
        division: the division of a global batch among ranks and micro-batches.
        limit: the limit of steps per epoch; None for all.

    Attributes:
        batch_size: samples of a global batch of the first loader; of its first batch, if a batch_sampler gives them.
        layouts: those of the first loader's batches.
        has_one_size: whether each batch has their size: not of several loaders, nor of a batch_sampler.
    """

    def __init__(self, loaders: Loaders, division: Division, seed: int, limit: int | float | None) -> None:
        self.loaders, self.limit = loaders, limit
        self.rank_loaders: list[RankLoader | StreamLoader] = []
        self.sources = [_source(loader, division, seed) for loader in loaders.leaves]
        size = self.batch_size = self.sources[0].batch_size
        is_given = self.sources[0].is_given
        if division.bit_exact and is_given:  # batches of virtual ranks, of any sizes
            size -= size % division.virtual_ranks
        self.layouts = division.layouts(size)
        self.has_one_size = len(self.sources) == 1 and not is_given
        for source in self.sources:
            _check(source, loaders.method)

    @cached_property
    def steps(self) -> int | None:
        """Number of steps per epoch; None if a stream ends it."""
        counts = [source.steps for source in self.sources]
        known = [steps for steps in counts if steps is not None]
        is_shortest = self.loaders.mode == "min_size"
        if len(known) == len(counts):
            return apply_limit(_OPTION, self.limit, min(known) if is_shortest else max(known))
        if not is_shortest and len(counts) > 1:
            raise UserError(
                f"{self.loaders.method}: a stream without a length cannot be combined in the mode {self.loaders.mode}: "
                'give it a __len__, or return CombinedLoader(..., "min_size")'
            )
        limit = limit_without_length(_OPTION, self.limit)
        return None if limit is None else min([limit, *known])

    def of_rank(self, device: torch.device) -> "RankLoader | StreamLoader | CombinedRankLoader":
        """Return the loader of this rank."""
        self.rank_loaders = [source.of_rank(self._steps_of(source), device) for source in self.sources]
        if self.loaders.structure.is_leaf():
            return self.rank_loaders[0]
        return CombinedRankLoader(self.rank_loaders, self.loaders)

    def resume(self, epoch: int, steps: int, states: Sequence[Any]) -> None:
        """Let the loader of this rank begin after so many steps of an epoch, with the states of streams."""
        for loader, state in zip(self.rank_loaders, states or repeat(None), strict=False):
            loader.sampler.epoch, loader.sampler.start = epoch, steps
            if isinstance(loader, StreamLoader):
                loader.state = state

    def states_after(self, steps: int) -> list[Any]:
        """Return the state of each stream after so many steps of the epoch."""
        return [loader.states.get(steps) if isinstance(loader, StreamLoader) else None for loader in self.rank_loaders]

    def example_batches(self, spans: Sequence[tuple[int, int]]) -> list[StepParts]:
        """Return a batch of the samples of the first loader for each of `spans`, and of others alike."""
        of_sources = []
        for source in self.sources:
            scaled = [[-(-number * source.batch_size // self.batch_size) for number in span] for span in spans]
            of_sources.append(source.examples([(first, max(last, first + 1)) for first, last in scaled]))
        return [combine(several, self.loaders.structure) for several in zip(*of_sources, strict=True)]

    def _steps_of(self, source: "_Source") -> int | None:
        """Return how many batches of a loader an epoch takes; more than it has if it begins again, None for all."""
        if self.steps is None:
            return source.steps
        has_end = self.loaders.mode == "max_size" and source.steps is not None
        return min(self.steps, cast(int, source.steps)) if has_end else self.steps


class CombinedRankLoader:
    """Yields a collection of the batches of several loaders, as `lightning.pytorch.utilities.CombinedLoader` does.

    With the mode `max_size` a loader that has ended gives None; otherwise the loaders have as many steps as the epoch.
    """

    def __init__(self, rank_loaders: Sequence[RankLoader | StreamLoader], loaders: Loaders) -> None:
        self.rank_loaders, self.loaders = rank_loaders, loaders
        self.sampler = self.batch_sampler = self  # Lightning sets the epoch

    def set_epoch(self, epoch: int) -> None:
        for loader in self.rank_loaders:
            loader.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return (max if self.loaders.mode == "max_size" else min)(map(len, self.rank_loaders))

    def __iter__(self) -> Iterator[StepParts]:
        together = zip_longest if self.loaders.mode == "max_size" else zip
        for of_loaders in together(*self.rank_loaders):
            yield combine(of_loaders, self.loaders.structure)


def combine(of_loaders: Sequence[StepParts | None], structure: TreeSpec) -> StepParts:
    """Return the parts of a step with a collection of the batches of several loaders; None of those that have ended."""
    combined = StepParts()
    if len({part.weight for parts in of_loaders if parts for part in parts}) > 1:
        raise UserError(
            "the loaders of a step divide unevenly among the processes, which have different numbers of samples of one "
            "of its loaders: set batch sizes that divide among them, or bit_exact=true"
        )
    for parts in zip(*(parts or repeat(None) for parts in of_loaders), strict=False):
        first = next(part for part in parts if part)
        batches = [part.batch if part else None for part in parts]
        combined.append(first._replace(batch=tree_unflatten(batches, structure)))
    return combined


class _Samples:
    """A loader of a map-style dataset. Without a `batch_size` its samples are batches.

    Attributes:
        is_given: whether a `batch_sampler` gives the batches; one by one, each is that of a virtual rank.
        per_step: how many batches a step takes.
    """

    digest: str | None = None

    def __init__(self, loader: DataLoader[Any], division: Division, seed: int) -> None:
        self.loader, self.division, self.seed = loader, division, seed
        self.is_given = has_given_batches(loader)
        if self.is_given:
            self.per_step = division.virtual_ranks if division.bit_exact else 1
            sizes = [len(batch) for batch in order_of(loader, seed, 0)]
            self.batch_size, self.samples = sum(sizes[: self.per_step]), sum(sizes)
            self.steps = len(sizes) // self.per_step
        else:
            self.per_step, self.batch_size = 1, loader.batch_size or division.virtual_ranks
            self.samples = len(cast(Any, loader.sampler))
            self.steps = self.samples // self.batch_size

    def of_rank(self, steps: int | None, device: torch.device) -> RankLoader:
        assert steps is not None
        of_epoch = lru_cache(1)(partial(self._batches, steps))
        if self.is_given and self.division.bit_exact:
            whole, own = Division(virtual_ranks=1), self.division.own_virtual_ranks
            batches = TrainingBatches(of_epoch, whole, steps, self.per_step, own)
        else:
            batches = TrainingBatches(of_epoch, self.division, steps)
        return RankLoader(self.loader, batches, self.seed, device, self.division.is_divided)

    def examples(self, spans: Sequence[tuple[int, int]]) -> list[StepParts]:
        return examples(self.loader, spans, self.seed)

    def _batches(self, steps: int, epoch: int) -> list[Tensor]:
        """Return the batches of an epoch: as many of each cycle through the loader, of which each has a seed."""
        batches, count = list[Tensor](), min(steps, self.steps) * self.per_step
        for cycle in range(-(-steps // self.steps)):
            order = order_of(self.loader, int(hash_ints(self.seed, cycle)) if cycle else self.seed, epoch)
            if isinstance(order, Tensor):
                firsts = range(0, len(order) - self.batch_size + 1, self.batch_size)  # the last samples are left out
                order = [order[first : first + self.batch_size] for first in firsts]
            if len(order) < count:
                sampler = self.loader.batch_sampler if self.is_given else self.loader.sampler
                raise UserError(
                    f"{type(sampler).__name__} gives less in epoch {epoch} than in the first one: let it give as many "
                    "samples or batches in each, or set a smaller trainer.limit_train_batches"
                )
            batches += order[:count]
        return batches


class _Stream:
    """A loader of an IterableDataset. Without a `batch_size` its samples are batches."""

    is_given, per_step = False, 1

    def __init__(self, loader: DataLoader[Any], division: Division, seed: int) -> None:
        self.loader, self.division, self.seed = loader, division, seed
        self.batch_size = loader.batch_size or division.virtual_ranks
        self.samples = length_of_stream(loader.dataset)
        self.digest, self.has_exact_state = examine(loader, seed)
        self.steps = None if self.samples is None else self.samples // self.batch_size

    def of_rank(self, steps: int | None, device: torch.device) -> StreamLoader:
        division, size = self.division, self.batch_size
        per_pass = self.steps if steps is not None and self.steps is not None and steps > self.steps else None
        weight = division.weight(size)
        return StreamLoader(
            *(self.loader, size, division.positions, steps, self.seed, division.is_divided, weight, per_pass),
            has_exact_state=self.has_exact_state,
        )

    def examples(self, spans: Sequence[tuple[int, int]]) -> list[StepParts]:
        """Return a batch of the samples at the places of each of `spans`."""
        places = [torch.arange(first, first + 1 if yields_batches(self.loader) else last) for first, last in spans]
        end = max(last for _, last in spans)
        return list(StreamLoader(self.loader, end, partial(_up_to, places), 1, self.seed, evaluates=True))


_Source = _Samples | _Stream


def _check(source: _Source, method: str) -> None:
    """Check that a loader has a batch that divides among the ranks, and that its order is that of any process."""
    if yields_batches(source.loader) and not source.division.bit_exact:
        raise UserError(
            f"{method} has batch_size=None, and a batch that the dataset makes cannot be divided: set bit_exact=true, "
            "with which it is the batch of a virtual rank, or give batch_size, the samples of an optimizer step"
        )
    if source.steps == 0:
        if source.is_given and source.per_step > 1:
            raise UserError(
                f"the batch_sampler of {method} has fewer batches than a step takes, {source.per_step}: with "
                "bit_exact=true each virtual rank has one; give it more, or set fewer virtual_ranks"
            )
        raise UserError(
            f"data.batch_size={source.batch_size} exceeds the {source.samples} samples to train on, of {method}"
        )
    if not source.is_given:
        source.division.positions(source.batch_size)
    if not isinstance(source, _Stream):
        check_repeatable(source.loader, source.seed, method)


def _source(loader: DataLoader[Any], division: Division, seed: int) -> _Source:
    return (_Stream if isinstance(loader.dataset, IterableDataset) else _Samples)(loader, division, seed)


def _up_to(places: list[Tensor], count: int) -> list[Tensor]:
    return [of_one[of_one < count] for of_one in places]
