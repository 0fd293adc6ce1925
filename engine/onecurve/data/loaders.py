"""The loaders that a DataModule returns, and their division among the ranks, whatever kind of loader each is.

The batches of training loaders are divided into the parts of a step. In an evaluation each sample belongs to one rank.
"""

import logging
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache, cached_property, lru_cache, partial
from itertools import chain, repeat
from types import FunctionType
from typing import Any, NamedTuple, cast

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from onecurve.data.batch import StepParts, combine
from onecurve.data.layout import DataParallelInfo, Division
from onecurve.data.limits import apply_limit
from onecurve.data.module_data import as_one_process
from onecurve.data.orders import has_batch_sampler, length_of, order_of, sampler_of
from onecurve.data.rank_batches import EvaluationBatches, TrainingBatches
from onecurve.data.rank_loader import (
    RankLoader,
    check_repeatable,
    check_samples,
    disables_batching,
    examples,
    fetches_batches,
)
from onecurve.data.streams import StreamLoader, examine
from onecurve.errors import UserError
from onecurve.patches.lightning_loops import combination_mode
from onecurve.patches.torch import TreeSpec, tree_flatten, tree_unflatten
from onecurve.random.hashing import hash_ints
from onecurve.random.seeding import EVALUATION, seed_generators

_log = logging.getLogger(__name__)
_NOT_CALLED = "%s: %s of %s is not called: batches are made of its dataset, sampler and collate_fn"
_warn_once = cache(_log.warning)  # and not in each stage, nor each epoch that reloads
_OPTION = "trainer.limit_train_batches"


class Loaders(NamedTuple):
    """The loaders that a method returned.

    Attributes:
        method: the method, for error messages.
        leaves: the loaders.
        structure: the collection whose leaves they are.
        mode: that of a `CombinedLoader`; Lightning's default for anything else.
    """

    method: str
    leaves: list[DataLoader[Any]]
    structure: TreeSpec
    mode: str


def loaders_of(plain: L.LightningDataModule, name: str, seed: int) -> Loaders:
    """Return the loaders of `train`, `val`, `test` or `predict` of a DataModule, made with generators of this seed.

    Raises:
        UserError: if a loader hides which samples there are, or the loaders cannot be combined.
    """
    method, returned = f"{type(plain).__name__}.{name}_dataloader", None
    if is_overridden(f"{name}_dataloader", plain, L.LightningDataModule):
        with isolate_rng(include_cuda=False), as_one_process():
            seed_generators(seed)
            returned = getattr(plain, f"{name}_dataloader")()
    is_training = name == "train"
    collection, mode = returned, "max_size_cycle" if is_training else "sequential"
    if isinstance(returned, CombinedLoader):
        collection, mode = returned.iterables, combination_mode(returned)
    leaves, structure = tree_flatten([] if collection is None else collection)
    if (mode == "sequential") == is_training:
        raise UserError(
            f"{method} combines loaders in the mode {mode}: "
            + ("training takes a batch of each" if is_training else "an evaluation takes one after the other")
        )
    for loader in leaves:
        _check_loader(loader, method)
    return Loaders(method, leaves, structure, mode)


def _check_loader(loader: Any, method: str) -> None:
    """Check that the dataset of a loader, and not the loader, decides which samples there are."""
    if not isinstance(loader, DataLoader):
        raise UserError(f"{method} returns {type(loader).__name__}: return a torch DataLoader")
    kind = type(loader)
    if kind.__module__.partition(".")[0] != "litdata":  # whose own methods count the samples for its state
        if kind.__iter__ is not DataLoader.__iter__:
            raise UserError(f"{method}: {kind.__name__} has an __iter__ of its own: return a torch DataLoader")
        for name, original in vars(DataLoader).items():
            is_method = isinstance(original, FunctionType | property) and name != "__init__"
            if is_method and getattr(kind, name) is not original:
                _warn_once(_NOT_CALLED, method, name, kind.__name__)
    if hasattr(loader.sampler, "num_replicas"):
        raise UserError(f"{method} has a {type(loader.sampler).__name__}: leave it out, ranks share the data anyway")


class TrainingLoaders:
    """The training loaders of a run: one, or a collection of several that a step takes a batch of each.

    `limit` is that of the steps per epoch; None for all.

    Attributes:
        batch_size: samples of a global batch of the first loader; of its first batch, if a batch_sampler gives them.
        layout: that of the first loader's batches, or of the first virtual rank in them.
        has_one_size: whether each batch has their size: not of several loaders, nor of a batch_sampler.
    """

    def __init__(self, loaders: Loaders, division: Division, seed: int, limit: int | float | None) -> None:
        self.loaders, self.limit = loaders, limit
        self.rank_loaders: list[RankLoader | StreamLoader] = []
        # Each loader has an order of its own: two of the same length would always pair the same samples.
        seeds = [seed, *(int(hash_ints(seed, 0, number)) for number in range(1, len(loaders.leaves)))]
        self.sources: list[_Source] = []
        for loader, own in zip(loaders.leaves, seeds, strict=True):
            kind = _StreamSource if isinstance(loader.dataset, IterableDataset) else _MapSource
            self.sources.append(kind(loader, division, own))
        first = self.sources[0]
        size = self.batch_size = first.batch_size
        if division.bit_exact and first.has_batch_sampler:  # batches of virtual ranks, of any sizes
            size -= size % division.virtual_ranks
        self.layout = division.layouts(size)[0]
        self.has_one_size = len(self.sources) == 1 and not first.has_batch_sampler
        for source in self.sources:
            _check(source, loaders.method)

    def warn_of_rest(self) -> None:
        """Warn of samples at the end of an epoch that are never trained, as a loader in one order leaves the same."""
        for source in self.sources if self.limit is None else []:
            rest = (source.samples or 0) % source.batch_size
            if rest and isinstance(sampler_of(source.loader), SequentialSampler) and not source.loader.drop_last:
                _log.warning(
                    "%s: the last %d of %d samples are never trained, because an epoch takes whole batches and the "
                    "loader does not shuffle: set shuffle=True, or a batch_size that divides them",
                    *(self.loaders.method, rest, source.samples),
                )

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
        limit = apply_limit(_OPTION, self.limit, None)
        return None if limit is None else min([limit, *known])

    def of_rank(self, device: torch.device) -> RankLoader | StreamLoader | CombinedLoader:
        """Return the loader of this rank.

        Of several, each has as many steps as the epoch; with the mode `max_size` one that has ended gives None.
        """
        self.rank_loaders = [source.of_rank(self._steps_of(source), device) for source in self.sources]
        if self.loaders.structure.is_leaf():
            return self.rank_loaders[0]
        together = tree_unflatten(self.rank_loaders, self.loaders.structure)
        return CombinedLoader(together, "max_size" if self.loaders.mode == "max_size" else "min_size")

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
            scale = Fraction(source.batch_size, self.batch_size)
            scaled = [(math.ceil(first * scale), math.ceil(last * scale)) for first, last in spans]
            of_sources.append(source.examples([(first, max(last, first + 1)) for first, last in scaled]))
        return [combine(tree_unflatten(several, self.loaders.structure)) for several in zip(*of_sources, strict=True)]

    def _steps_of(self, source: "_Source") -> int | None:
        """Return how many batches of a loader an epoch takes; more than it has if it begins again, None for all."""
        if self.steps is None:
            return source.steps
        has_end = self.loaders.mode == "max_size" and source.steps is not None
        return min(self.steps, cast(int, source.steps)) if has_end else self.steps


class _MapSource:
    """A loader of a map-style dataset. Without a `batch_size` its samples are batches.

    Attributes:
        has_batch_sampler: whether a `batch_sampler` gives the batches; one by one, each is that of a virtual rank.
        per_step: how many batches a step takes.
    """

    digest: str | None = None

    def __init__(self, loader: DataLoader[Any], division: Division, seed: int) -> None:
        self.loader, self.division, self.seed = loader, division, seed
        self.has_batch_sampler, order = has_batch_sampler(loader), order_of(loader, seed, 0)
        if self.has_batch_sampler:
            self.per_step = division.virtual_ranks if division.bit_exact else 1
            sizes = [len(batch) for batch in order]
            self.batch_size, self.samples = sum(sizes[: self.per_step]), sum(sizes)
            self.steps = len(sizes) // self.per_step
        else:
            self.per_step, self.batch_size = 1, loader.batch_size or division.virtual_ranks
            self.samples, self.steps = len(order), len(order) // self.batch_size

    def of_rank(self, steps: int | None, device: torch.device) -> RankLoader:
        assert steps is not None
        of_epoch = lru_cache(1)(partial(self._batches, steps))
        if self.has_batch_sampler and self.division.bit_exact:
            whole, own = Division(virtual_ranks=1), self.division.own_virtual_ranks
            batches = TrainingBatches(of_epoch, whole, steps, self.per_step, own)
        else:
            batches = TrainingBatches(of_epoch, self.division, steps)
        return RankLoader(self.loader, batches, self.seed, device, self.division.is_divided)

    def examples(self, spans: Sequence[tuple[int, int]]) -> list[StepParts]:
        return examples(self.loader, spans, self.seed)

    def _batches(self, steps: int, epoch: int) -> Tensor | list[Tensor]:
        """Return the batches of an epoch; a loader that has fewer begins again, each time in another order."""
        cycles, count = list[Any](), min(steps, self.steps) * self.per_step
        for cycle in range(-(-steps // self.steps)):
            order = order_of(self.loader, int(hash_ints(self.seed, cycle)) if cycle else self.seed, epoch)
            if isinstance(order, Tensor):
                order = order[: len(order) // self.batch_size * self.batch_size].view(-1, self.batch_size)
            if len(order) < count:
                raise UserError(
                    f"{type(sampler_of(self.loader)).__name__} gives less in epoch {epoch} than in the first one: let "
                    "it give as many samples or batches in each, or set a smaller trainer.limit_train_batches"
                )
            cycles.append(order[:count])
        return list(chain.from_iterable(cycles)) if self.has_batch_sampler else torch.cat(cycles)


class _StreamSource:
    """A loader of an IterableDataset. Without a `batch_size` its samples are batches."""

    has_batch_sampler, per_step = False, 1

    def __init__(self, loader: DataLoader[Any], division: Division, seed: int) -> None:
        self.loader, self.division, self.seed = loader, division, seed
        self.batch_size = loader.batch_size or division.virtual_ranks
        self.samples = length_of(loader.dataset)
        self.digest, self.has_exact_state = examine(loader, seed)
        self.steps = None if self.samples is None else self.samples // self.batch_size

    def of_rank(self, steps: int | None, device: torch.device) -> StreamLoader:
        return StreamLoader(
            self.loader,
            self.batch_size,
            self.division.positions,
            steps,
            self.seed,
            is_divided=self.division.is_divided,
            weight=self.division.weight(self.batch_size),
            steps_per_pass=self.steps,
            has_exact_state=self.has_exact_state,
        )

    def examples(self, spans: Sequence[tuple[int, int]]) -> list[StepParts]:
        """Return a batch of the samples at the places of each of `spans`; a stream that ends before begins again."""
        places = [torch.arange(first, first + 1 if disables_batching(self.loader) else last) for first, last in spans]
        end = max(last for _, last in spans)
        return list(StreamLoader(self.loader, end, partial(_within, places), 1, self.seed, evaluates=True))


_Source = _MapSource | _StreamSource


def _check(source: _Source, method: str) -> None:
    """Check that a loader has a batch that divides among the ranks, and that its order is that of any process."""
    if disables_batching(source.loader) and not source.division.bit_exact:
        raise UserError(
            f"{method} has batch_size=None, and a batch that the dataset makes cannot be divided: set bit_exact=true, "
            "with which it is the batch of a virtual rank, or give batch_size, the samples of an optimizer step"
        )
    if source.steps == 0:
        if source.has_batch_sampler and source.per_step > 1:
            raise UserError(
                f"the batch_sampler of {method} has fewer batches than a step takes, {source.per_step}: with "
                "bit_exact=true each virtual rank has one; give it more, or set fewer virtual_ranks"
            )
        raise UserError(
            f"data.batch_size={source.batch_size} exceeds the {source.samples} samples to train on, of {method}"
        )
    if not source.has_batch_sampler:
        source.division.positions(source.batch_size)
    if not isinstance(source, _StreamSource):
        check_repeatable(source.loader, source.seed, method)


def _within(places: list[Tensor], count: int) -> list[Tensor]:
    return [of_one % count for of_one in places]


class EvaluationLoaders:
    """The loaders of `val`, `test` or `predict`, which are evaluated one after the other.

    The ranks of the `division` of training batches share the samples; `limit` is that of global batches, None for all.

    Attributes:
        leaves: all loaders.
        evaluated: all loaders if one of them has samples to evaluate, so that each keeps its `dataloader_idx`; with the
            seed and the order of each.
    """

    def __init__(self, name: str, loaders: Loaders, division: Division, seed: int, limit: int | float | None) -> None:
        self.name, self.leaves, self.division, self.limit = name, loaders.leaves, division, limit
        # Each loader has numbers of its own: samples that a dataset draws are not those of training or another loader.
        seeds = [int(hash_ints(seed, *name.encode(), number)) for number in range(len(loaders.leaves))]
        self._ordered: list[tuple[DataLoader[Any], int, Tensor | list[Tensor] | None]] = []  # None is that of a stream
        for loader, own in zip(self.leaves, seeds, strict=True) if limit != 0 else ():  # an order takes time
            is_stream = isinstance(loader.dataset, IterableDataset)
            self._ordered.append((loader, own, None if is_stream else order_of(loader, own, EVALUATION)))
        has_samples = any(order is None or len(order) for *_, order in self._ordered)
        self.evaluated = self._ordered if has_samples else []
        self._option, self._method = f"trainer.limit_{name}_batches", loaders.method
        parallel = division.parallel
        self.parallel, self.ranks = parallel, [parallel.dp_rank]
        if name == "predict":  # all ranks gather as many predictions
            self.parallel = DataParallelInfo(parallel.dp_size, parallel.dp_rank)
        elif division.bit_exact:
            division.check_virtual_ranks()
            self.parallel, self.ranks = DataParallelInfo(division.virtual_ranks), list(division.own_virtual_ranks)

    def of_rank(self, device: torch.device) -> Any:
        """Return the loader of this rank, or a list of several."""
        loaders: list[Any] = []
        for loader, seed, order in self.evaluated:
            if order is None:
                loaders.append(self._stream(loader, seed))
            else:
                batches = self._batches(loader, order)
                loaders.append(RankLoader(loader, batches, seed, device, self.division.is_divided))
        return loaders[0] if len(loaders) == 1 else loaders

    def check(self, takes_batch: bool) -> None:
        """Check that ranks have equal samples, and one in each batch unless padding has a weight of zero."""
        for loader, seed, order in self._ordered:
            if order is None:
                continue
            batches = self._batches(loader, order)
            if dist.is_initialized():  # a rank may have none
                check_samples(loader, batches.order[:1], seed, self._method)
            if not (fetches_batches(loader.dataset) and (takes_batch or self.name == "predict")):
                parts = self.division.accumulate if loader.batch_size else None
                batches.check_no_rank_is_empty(self.name, parts)

    def _batches(self, loader: DataLoader[Any], order: Tensor | list[Tensor]) -> EvaluationBatches:
        unit = self._unit(loader)
        if not isinstance(order, Tensor):
            order, unit = torch.cat([torch.arange(0), *order]), max(map(len, order), default=1)
        if loader.drop_last and self.name != "predict":  # where Lightning keeps all
            order = order[: len(order) // unit * unit]
        count = apply_limit(self._option, self.limit, len(order), unit)
        # A batch that the dataset has made cannot be joined with another one.
        size = unit if disables_batching(loader) else unit // self.division.accumulate
        return EvaluationBatches(order[:count], size, self.parallel, self.ranks, unit)

    def _stream(self, loader: DataLoader[Any], seed: int) -> StreamLoader:
        samples, unit = length_of(loader.dataset), self._unit(loader)
        rest = 0 if loader.drop_last else unit - 1
        steps = apply_limit(self._option, self.limit, None if samples is None else (samples + rest) // unit)
        return StreamLoader(loader, unit, self._divide, steps, seed, self.division.is_divided, evaluates=True)

    def _divide(self, count: int) -> Sequence[Tensor]:
        """Return the positions of this rank in so many samples of a stream."""
        if count < self.parallel.dp_size:
            raise UserError(
                f"a batch of {count} samples of the stream of `{self.name}` leaves a process or virtual rank without "
                f"one: set the loader's batch_size, trainer.limit_{self.name}_batches, or fewer trainer.devices"
            )
        return [torch.arange(rank, count, self.parallel.dp_size) for rank in self.ranks]

    def _unit(self, loader: DataLoader[Any]) -> int:
        """Return the samples of a global batch: as many as ranks, if the dataset makes the batch of each."""
        return self.parallel.dp_size if disables_batching(loader) else cast(int, loader.batch_size)
