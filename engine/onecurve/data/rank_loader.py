"""The loader of a rank: its part of each batch of a torch DataLoader, which is taken apart.

The samples are fetched with the generators seeded for each, and collated; a batch of another number is refused.
"""

import logging
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, default_collate, get_worker_info

from onecurve.data.batch import StepParts, as_part
from onecurve.data.orders import has_batch_sampler, is_repeatable, length_of, order_of, sampler_of
from onecurve.data.rank_batches import EvaluationBatches, TrainingBatches
from onecurve.errors import UserError
from onecurve.network.object_state import are_equal, digest_of
from onecurve.patches.torch import leaves_with_paths, tree_leaves
from onecurve.process import signals
from onecurve.process.gather import gather_objects
from onecurve.random.hashing import hash_ints
from onecurve.random.seeding import FETCHING, refuse_draws, seed_generators

_log = logging.getLogger(__name__)
_PROBED, _PROBED_PAIRS = 8, 4  # samples
# What the loader of a rank takes over from the user's; what makes batches and starts workers aside.
_OPTIONS = ("timeout", "in_order", "prefetch_factor", "persistent_workers")
_UNDRAWN = random.Random(0).getstate()
_Batches = TrainingBatches | EvaluationBatches


class RankLoader:
    """Yields the batches of a rank, each as `StepParts`.

    It is no DataLoader, so that Lightning neither builds it again, as it does for predictions, nor gives it a sampler.

    A dataset may have two methods: `batches` maps (batches, n) indices, of which -1 is padding, to an iterator over
    `Batch`; and `move_to(device)`, which may move the samples, returns whether these batches are then on the device. If
    so, the indices of an epoch are sent at once, without a host-device synchronization.

    `batches` are those of the rank, as indices. With `is_divided`, others hold parts of the same global batch.
    """

    def __init__(
        self, loader: DataLoader[Any], batches: _Batches, seed: int, device: torch.device, is_divided: bool = False
    ) -> None:
        self.dataset: Any = loader.dataset
        self.sampler = self.batch_sampler = batches  # Lightning reads both, and sets the epoch
        self._seed, self._disables_batching = seed, disables_batching(loader)
        fetches = fetches_batches(self.dataset)
        is_on_device = fetches and not loader.num_workers and self.dataset.move_to(device)
        self._device = device if is_on_device else None
        # Parts are weighted by their indices, so a `collate_fn` must not leave samples out.
        axis = sample_axis(loader, order_of(loader, seed, batches.epoch), seed) if is_divided else None
        samples = SeededSamples(self.dataset, collate_function(loader), is_divided, axis)
        keyed = _KeyedBatches(batches, seed, keep_padding=fetches)
        options = {name: getattr(loader, name) for name in _OPTIONS} | {"pin_memory": device.type == "cuda"}
        self._loader = _seeded_loader(loader, samples, keyed, loader.num_workers, seed, **options)

    def __len__(self) -> int:
        return len(self.sampler) // self.sampler.parts_per_step

    def __iter__(self) -> Iterator[StepParts]:
        batches, weights = self._batches(), self.sampler.weights()
        while several := list(islice(batches, self.sampler.parts_per_step)):
            yield StepParts(as_part(*batch, next(weights), self._disables_batching) for batch in several)

    def _batches(self) -> Iterator[tuple[Tensor, Any]]:
        if self._device is None:
            # As in `worker_options`. Persistent workers keep the seeds of the first epoch, also in a resumed run.
            epoch = 0 if self._loader.persistent_workers else self.sampler.epoch
            self._loader.generator.manual_seed(int(hash_ints(self._seed, epoch)))
            with errors_of_workers():
                yield from self._loader
            return
        for _, of_one_size in groupby(self.sampler, len):
            rows = torch.stack([*of_one_size])
            rows = rows.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else rows
            for batch in self.dataset.batches(rows):
                yield batch.sample_index, batch


class _KeyedBatches(Sampler[Tensor]):
    """Batches of (2, n): indices, and the keys of the samples' random numbers.

    A key depends on the place in the epoch, so that a sample that occurs twice gets other random numbers.
    """

    def __init__(self, batches: _Batches, seed: int, keep_padding: bool) -> None:
        self.batches, self.seed, self.keep_padding = batches, seed, keep_padding

    def __iter__(self) -> Iterator[Tensor]:
        for indices, places in zip(self.batches, self.batches.places(), strict=True):
            batch = torch.stack([indices, hash_ints(self.seed, self.batches.epoch, places, FETCHING)])
            yield batch if self.keep_padding else batch[:, batch[0] >= 0]


class SampleAxis(NamedTuple):
    """Which size of a batch is its number of samples, or a multiple: dimension `dim` of the tensor number `leaf`."""

    leaf: int
    dim: int
    per_sample: int

    def samples_in(self, batch: Any) -> float:
        return tree_leaves(batch)[self.leaf].shape[self.dim] / self.per_sample


@dataclass(eq=False)
class SeededSamples(Dataset[Any]):
    """Fetches batches: the indices of n samples, (n,), and what `collate` makes of the samples.

    The global generators of torch, NumPy and Python are seeded with each sample's key before it is fetched, and with
    a hash of the first sample's before they are collated. Workers have no state: the key comes with the index.

    If a global batch `is_divided` among ranks or micro-batches, `collate` must not draw random numbers, nor change the
    number of samples, which the `axis` of a batch tells, if it is known.

    `draws_from_python` tells whether the dataset draws from Python's generator, once a batch has been fetched.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    is_divided: bool = False
    axis: SampleAxis | None = None
    draws_from_python: bool | None = None

    def __getitems__(self, samples: Tensor) -> tuple[Tensor, Any]:
        """Fetch the samples of (2, n) indices and keys; a dataset that has `batches` does so itself."""
        indices, keys = samples
        if fetches_batches(self.dataset):
            return indices, next(iter(self.dataset.batches(indices[None])))
        with isolate_rng(include_cuda=False) if get_worker_info() is None else nullcontext():
            items = self._fetch_seeded(samples)
            seed_generators(int(hash_ints(int(keys[0]))))
            with refuse_draws("collate_fn", self.is_divided and self.collate is not default_collate):
                batch = self.collate(items)
            is_counted = self.is_divided and self.axis and batch is not None  # None is refused by `batch_of_hooks`
            made = self.axis.samples_in(batch) if is_counted else len(items)
            if made != len(items):
                raise UserError(
                    f"collate_fn makes a batch of {made:g} samples from {len(items)}, so the curve would depend on the "
                    "number of processes: leave samples out in the dataset, or set bit_exact=true"
                )
            return indices, batch

    def _fetch_seeded(self, samples: Tensor) -> list[Any]:
        """Fetch samples, each with generators of its key.

        To seed Python's takes longer than to fetch a sample from memory. So that is left out if no sample of the first
        batch draws from it. If one of a later batch does, the batch is fetched again.
        """
        is_first, has_drawn = self.draws_from_python is None, False
        seeds_python = self.draws_from_python is not False
        random.seed(0)
        worker = get_worker_info()
        items: list[Any] = []
        for index, key in samples.T.tolist():
            seed_generators(key, with_python=seeds_python)
            if worker:  # which a dataset may ask for its seed
                object.__setattr__(worker, "seed", torch.initial_seed())
            items.append(self._fetch(index))
            if is_first and not has_drawn:
                has_drawn = random.getstate() != random.Random(key).getstate()
        if is_first:
            self.draws_from_python = has_drawn
        elif not seeds_python and random.getstate() != _UNDRAWN:
            self.draws_from_python = True
            return self._fetch_seeded(samples)
        return items

    def _fetch(self, index: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            if not isinstance(error, UserError) and hasattr(error, "add_note"):  # Python 3.10 has no notes
                dataset = self.dataset
                while isinstance(dataset, Subset):
                    dataset, index = dataset.dataset, dataset.indices[index]
                error.add_note(f"This is sample {index} of {type(dataset).__name__}.")
            raise


def _seeded_loader(
    loader: DataLoader[Any], samples: SeededSamples, batches: Iterable[Tensor], workers: int, seed: int, **options: Any
) -> DataLoader[Any]:
    """Return a loader of batches of (2, n) indices and keys, whose workers start like those of the user's loader."""
    return DataLoader(
        samples,
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=tuple,  # which changes nothing: SeededSamples has collated the batch
        **worker_options(loader, workers, seed),
        **options,
    )


def _probe_loader(
    loader: DataLoader[Any], batches: Iterable[Tensor], seed: int, collate: Callable[[list[Any]], Any] | None = None
) -> DataLoader[Any]:
    """Return a loader of batches of (n,) indices, which are fetched apart from training.

    They need a worker, if training has some: this process would open files that workers then share with each other.
    """
    samples = SeededSamples(loader.dataset, collate or collate_function(loader))
    keyed = [torch.stack([indices, hash_ints(seed, 0, indices)]) for indices in batches]
    return _seeded_loader(loader, samples, keyed, min(1, loader.num_workers), seed)


def worker_options(loader: DataLoader[Any], workers: int, seed: int, epoch: int = 0) -> dict[str, Any]:
    """Return the options of a DataLoader whose workers start like those of the user's loader.

    The seeds of the workers, which a dataset may take for generators of its own, are those of the run and the epoch.
    """
    # Where ranks are spawned, so would be their workers: each would import torch again.
    context = loader.multiprocessing_context or ("fork" if workers and sys.platform == "linux" else None)
    return {
        "num_workers": workers,
        "worker_init_fn": partial(_init_worker, loader.worker_init_fn),
        "multiprocessing_context": context,
        "generator": torch.Generator().manual_seed(int(hash_ints(seed, epoch))),  # not the global one
    }


@contextmanager
def errors_of_workers() -> Iterator[None]:
    """Raise the UserError of a worker by its message alone."""
    try:
        yield
    except UserError as error:
        error.__traceback__ = None  # it refers to the iterator, which without it ends its workers at once
        # From a worker, torch raises the error with the text of its traceback, whose last line is the message.
        raise UserError(str(error).rpartition(f"{UserError.__qualname__}: ")[2].strip()) from None


def check_repeatable(loader: DataLoader[Any], seed: int, method: str) -> None:
    """Refuse a sampler, and warn of a dataset, with random numbers that the keys do not determine."""
    sampler = sampler_of(loader)
    if not is_repeatable(sampler, seed, loader.dataset, has_batch_sampler(loader)):
        raise UserError(
            f"{method}: {type(sampler).__name__} has a random generator of its own, so each process would have "
            "another order: let it draw from the global generator of torch, NumPy or Python"
        )
    order = order_of(loader, seed, 0)  # a sampler may leave out samples that cannot be fetched
    order = order if isinstance(order, Tensor) else torch.cat(order)
    count = 1 if disables_batching(loader) else min(_PROBED, len(order))
    spread = torch.linspace(0, len(order) - 1, count, dtype=torch.float64)
    check_samples(loader, order[spread.long()], seed, method)  # those of one class may be one after the other


def check_samples(loader: DataLoader[Any], indices: Tensor, seed: int, method: str) -> None:
    """Warn of samples that differ when they are fetched again, or between the ranks; refuse other numbers of them.

    Every rank must call it.
    """
    if fetches_batches(loader.dataset):
        return
    collate = partial(_collate_if_possible, collate_function(loader))
    size = 1 if has_batch_sampler(loader) else max(1, len(indices))  # samples of two batches may not fit together
    batches = [indices[first : first + size] for first in range(0, len(indices), size)]
    made = [batch for _, batch in _probe_loader(loader, batches * 2, seed, collate)]
    first, again = made[: len(batches)], made[len(batches) :]
    numbers = [leaf for leaf in tree_leaves(first) if not isinstance(leaf, str)]  # a path may be that of a node
    own = (length_of(loader.dataset), digest_of(numbers) if are_equal(first, again) else None)
    lengths, digests = zip(*gather_objects(own), strict=True)
    if len(set(lengths)) > 1:
        raise UserError(
            f"{method}: the ranks have {', '.join(map(str, lengths))} samples, so some would wait for others: let the "
            "dataset hold all samples on each rank"
        )
    if None in digests:
        _log.warning(
            "%s: a sample fetched twice differs, although torch, NumPy and Python are seeded alike. %s has a random "
            "generator or a state of its own, so the curve depends on the number of processes and on restarts: draw "
            "from the global generators instead",
            method,
            type(loader.dataset).__name__,
        )
    elif len(set(digests)) > 1:
        _log.warning(
            "%s: the ranks have different samples, and each reads a part of its own: let the dataset hold all samples "
            "on each rank, equal ones if they are drawn, as after the trainer is built, which seeds the generators",
            method,
        )


def find_sample_axis(pairs: Sequence[Any], singles: Sequence[Any]) -> SampleAxis | None:
    """Compare batches of two samples with batches of one: the size that doubles most often is the number of samples.

    Of several sizes it is one that is the number itself, as texts that are concatenated may have equal lengths. None if
    no size doubles more than once, by which a padded length might do so by chance.
    """
    doubled = Counter[SampleAxis]()
    for pair, single in zip(pairs, singles, strict=True):
        leaves = zip(leaves_with_paths(pair), leaves_with_paths(single), strict=False)
        for leaf, ((path, two), (other, one)) in enumerate(leaves):
            if path != other:  # a list of samples shifts the leaves behind it
                continue
            sizes = zip(getattr(two, "shape", ()), getattr(one, "shape", ()), strict=False)
            for dim, (of_pair, of_one) in enumerate(sizes):
                if of_one and of_pair == 2 * of_one:
                    doubled[SampleAxis(leaf, dim, of_one)] += 1
    if not doubled:
        return None
    axis = max(doubled, key=lambda found: (doubled[found], found.per_sample == 1))
    return axis if doubled[axis] > 1 else None


def sample_axis(loader: DataLoader[Any], order: Tensor | list[Tensor], seed: int) -> SampleAxis | None:
    """Return what has the number of samples in a batch, if a `collate_fn` of the user's might change it.

    It makes batches of pairs of samples, and of the first of each; a pair of which one is left out shows nothing. The
    pairs are spread over an epoch of the sampler, whose first samples may be alike, as texts sorted by their lengths.
    """
    if loader.collate_fn is default_collate or disables_batching(loader) or fetches_batches(loader.dataset):
        return None
    pairs: Tensor | list[Tensor]
    if isinstance(order, list):
        pairs = [batch[:2] for batch in order if len(batch) > 1]
    else:
        pairs = order[: len(order) // 2 * 2].view(-1, 2)
    if not len(pairs):
        return None
    chosen = torch.linspace(0, len(pairs) - 1, _PROBED_PAIRS, dtype=torch.float64).long().unique().tolist()
    small = [pairs[number][:size] for number in chosen for size in (2, 1)]
    made = [batch for _, batch in _probe_loader(loader, small, seed, partial(_collate_if_possible, loader.collate_fn))]
    return find_sample_axis(made[::2], made[1::2])


def _collate_if_possible(collate: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    try:
        return collate(samples)
    except Exception:  # nothing is left, or a batch of one sample is none
        return None


def examples(loader: DataLoader[Any], spans: Sequence[tuple[int, int]], seed: int) -> list[StepParts]:
    """Fetch batches, each as one part, of a loader's samples, numbered in a random order; samples may occur twice.

    A span is the number of the first sample of a batch, and of the one after its last. The first samples of a dataset
    may be of one class. If a `batch_sampler` gives the batches, the samples are those of the first one, because others
    may not fit together.

    Raises:
        TypeError: if the dataset is a stream.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise TypeError("the samples of a stream have no numbers")
    order, batches = order_of(loader, seed, 0), list[Tensor]()
    for first, last in spans:
        numbers = torch.arange(first, first + 1 if disables_batching(loader) else last)
        if isinstance(order, Tensor):
            batches.append(order[hash_ints(seed, numbers) % len(order)])
        else:
            batches.append(order[0][numbers % len(order[0])])
    return [StepParts([as_part(*batch)]) for batch in _probe_loader(loader, batches, seed)]


def fetches_batches(dataset: Any) -> bool:
    """Return whether a dataset makes batches of indices itself (`RankLoader`)."""
    return hasattr(dataset, "batches") and hasattr(dataset, "move_to")


def disables_batching(loader: DataLoader[Any]) -> bool:
    """Return whether the dataset of a loader yields batches, because the loader has `batch_size=None`."""
    return loader.batch_size is None and loader.batch_sampler is None


def collate_function(loader: DataLoader[Any]) -> Callable[[list[Any]], Any]:
    """Return what makes a batch of a list of samples, or of the one batch that the dataset has made itself."""
    return partial(_convert_only, loader.collate_fn) if disables_batching(loader) else loader.collate_fn


def _convert_only(convert: Callable[[Any], Any], batches: list[Any]) -> Any:
    (batch,) = batches
    return convert(batch)


def _init_worker(function: Callable[[int], Any] | None, worker: int) -> None:
    """Let a worker outlive stop requests, then call the user's function."""
    signals.outlive_requests()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # the user's, which the function may change
    if function:
        function(worker)
