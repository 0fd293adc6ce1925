"""The loader of a rank: its part of each batch of a torch DataLoader, which is taken apart."""

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, get_worker_info

from src.engine.determinism.batch import StepPart, StepParts, as_part
from src.engine.determinism.hashing import hash_ints, permutation
from src.engine.determinism.sampler import Batches, TrainingBatches
from src.engine.determinism.seeding import (
    SeededSamples,
    are_equal,
    makes_batches,
    seed_generators,
)
from src.engine.utils import signals
from src.engine.utils.errors import UserError

_log = logging.getLogger(__name__)
EVALUATION, SETUP = -1, -2  # in place of an epoch
_PROBED = 8  # samples
# What the loader of a rank takes over from the user's; what makes batches and starts workers aside.
_OPTIONS = ("timeout", "in_order", "prefetch_factor", "persistent_workers")


class RankLoader:
    """Yields the batches of a rank, each as `StepParts`.

    It is no DataLoader, so that Lightning neither builds it again, as it does for predictions, nor gives it a sampler.

    A dataset may have two methods: `batches` maps (batches, n) positions, of which -1 is padding, to an iterator over
    `Batch`; and `move_to(device)`, which may move the samples, returns whether these batches are then on the device. If
    so, the positions of an epoch are sent at once, without a host-device synchronization.

    Args:
        loader: the user's loader.
        batches: the positions of the rank's batches.
        seed: the seed of the run.
        device: the device of the rank.
        is_divided: whether a global batch has other batches too.
        parts: number of batches of `batches` that it yields at once, as the parts of an optimizer step.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: Batches,
        seed: int,
        device: torch.device,
        is_divided: bool = False,
        parts: int = 1,
    ) -> None:
        self.dataset: Any = loader.dataset
        self.sampler = self.batch_sampler = batches  # Lightning reads both, and sets the epoch
        self.parts = parts
        is_batched = makes_batches(self.dataset)
        is_there = is_batched and self.dataset.move_to(device) and not loader.num_workers
        self._device = device if is_there else None
        samples = SeededSamples(self.dataset, loader.collate_fn, is_divided)
        keyed = _KeyedBatches(batches, seed, keep_padding=is_batched)
        options = {name: getattr(loader, name) for name in _OPTIONS}
        self._loader = fetch(loader, samples, keyed, loader.num_workers, pin_memory=device.type == "cuda", **options)

    def __len__(self) -> int:
        return len(self.sampler) // self.parts

    def __iter__(self) -> Iterator[StepParts]:
        batches = self._batches()
        while parts := StepParts(islice(batches, self.parts)):
            yield parts

    def _batches(self) -> Iterator[StepPart]:
        if self._device is not None:
            table = self.sampler.table()
            table = table.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else table
            for batch in self.dataset.batches(table):
                yield StepPart(batch.sample_index, batch)
            return
        try:
            for positions, batch in self._loader:
                yield as_part(positions, batch)
        except UserError as error:
            error.__traceback__ = None  # it refers to the iterator, which without it ends its workers at once
            # From a worker, torch raises the error with the text of its traceback, whose last line is the message.
            raise UserError(str(error).rpartition(f"{UserError.__qualname__}: ")[2].strip()) from None


class _KeyedBatches(Sampler[Tensor]):
    """Batches of (2, n): positions, and the keys of the samples' random numbers.

    A key depends on the place in the epoch, so that a sample that occurs twice gets other random numbers.
    """

    def __init__(self, batches: Batches, seed: int, keep_padding: bool) -> None:
        self.batches, self.seed, self.keep_padding = batches, seed, keep_padding

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Tensor]:
        table = self.batches.table()
        epoch = self.batches.epoch if isinstance(self.batches, TrainingBatches) else EVALUATION
        for batch in torch.stack([table, hash_ints(self.seed, epoch, self.batches.places())], dim=1):
            yield batch if self.keep_padding else batch[:, batch[0] >= 0]


def fetch(
    loader: DataLoader[Any], samples: SeededSamples, batches: Iterable[Tensor], workers: int, **options: Any
) -> DataLoader[Any]:
    """Return a loader of batches of (2, n) positions and keys, whose workers start like those of the user's loader.

    Samples that are fetched apart from training need a worker, if training has some: this process would open files that
    workers then share with each other.
    """
    # A rank is spawned, and so would be its workers: each would import torch again.
    context = loader.multiprocessing_context or ("fork" if workers and sys.platform == "linux" else None)
    return DataLoader(
        samples,
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=tuple,  # which changes nothing: SeededSamples has collated the batch
        num_workers=workers,
        worker_init_fn=partial(_init_worker, loader.worker_init_fn),
        multiprocessing_context=context,
        generator=torch.Generator(),  # a number for workers, which would come from the global generator
        **options,
    )


def check_repeatable(loader: DataLoader[Any], seed: int, method: str) -> None:
    """Refuse a sampler, and warn of a dataset, with random numbers that the keys do not determine."""
    if not torch.equal(epoch_order(loader.sampler, seed, 0), epoch_order(loader.sampler, seed, 0)):
        raise UserError(
            f"{method}: {type(loader.sampler).__name__} has a random generator of its own, so each process would have "
            "another order: let it draw from the global generator of torch, NumPy or Python"
        )
    if makes_batches(loader.dataset):
        return
    positions = torch.arange(min(_PROBED, len(loader.dataset)))  # type: ignore[arg-type]
    batch = torch.stack([positions, hash_ints(seed, 0, positions)])
    samples = SeededSamples(loader.dataset, loader.collate_fn)
    (_, first), (_, again) = fetch(loader, samples, [batch, batch], min(1, loader.num_workers))
    if not are_equal(first, again):
        _log.warning(
            "%s: a sample fetched twice differs, although torch, NumPy and Python are seeded alike. %s has a random "
            "generator or a state of its own, so the curve depends on the number of processes and on restarts: draw "
            "from the global generators instead",
            *(method, type(loader.dataset).__name__),
        )


def loaders_of(plain: L.LightningDataModule, name: str, seed: int) -> list[DataLoader[Any]]:
    """Return the loaders of `train`, `val`, `test` or `predict` of a DataModule, made with generators of this seed."""
    method = f"{name}_dataloader"
    if not is_overridden(method, plain, L.LightningDataModule):
        return []
    with isolate_rng(include_cuda=False):
        seed_generators(seed)
        returned = getattr(plain, method)()
    loaders = list(returned.values()) if isinstance(returned, dict) else returned
    loaders = list(loaders) if isinstance(loaders, list | tuple) else [loaders]
    for loader in loaders:
        check_loader(loader, f"{type(plain).__name__}.{method}")
    if name == "train" and len(loaders) != 1:
        raise UserError(
            f"{type(plain).__name__}.{method} returns {len(loaders)} loaders: return one, of a dataset that combines "
            "theirs"
        )
    return loaders


def check_loader(loader: Any, method: str) -> None:
    """Check that the dataset of a loader, and not the loader, decides which samples there are.

    Args:
        loader: what the DataModule returned.
        method: the method that returned it, for error messages.
    """
    if not isinstance(loader, DataLoader):
        raise UserError(f"{method} returns {type(loader).__name__}: return a torch DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        raise UserError(
            f"{method}: {type(loader.dataset).__name__} is an IterableDataset, whose samples cannot be divided among "
            "processes nor found again after a restart: give a dataset with __getitem__ and __len__"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UserError(f"{method}: {type(loader).__name__} has an __iter__ of its own: return a torch DataLoader")
    if loader.batch_size is None:
        raise UserError(
            f"{method} has a batch_sampler of its own, or batch_size=None: give batch_size, the samples of an "
            "optimizer step over all processes, and perhaps a sampler"
        )
    if hasattr(loader.sampler, "num_replicas"):
        raise UserError(f"{method} has a {type(loader.sampler).__name__}: leave it out, ranks share the data anyway")


def epoch_order(sampler: Any, seed: int, epoch: int) -> Tensor:
    """Return the (n,) positions of an epoch in the order of a user's sampler.

    Shuffling is the project's own. Other samplers draw from torch's global generator, or one of their own, seeded with
    a hash of (seed, epoch); so a weighted sampler, too, has the same order on any hardware and after a restart.
    """
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) <= len(sampler.data_source):
        return permutation(len(sampler.data_source), seed, epoch)[: len(sampler)]
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(max(epoch, 0))
    key = int(hash_ints(seed, epoch))
    with isolate_rng(include_cuda=False):
        seed_generators(key)
        if isinstance(getattr(sampler, "generator", None), torch.Generator):
            sampler.generator.manual_seed(key)
        return torch.tensor(list(sampler), dtype=torch.int64)


def _init_worker(function: Callable[[int], Any] | None, worker: int) -> None:
    """Let a worker outlive stop requests, then call the user's function."""
    signals.outlive_requests()
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # the user's, which the function may change
    if function:
        function(worker)
