"""The seeds of workers, from which a dataset may make generators of its own, are others in each epoch and run."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from onecurve.data.layout import Division
from onecurve.data.rank_batches import TrainingBatches
from onecurve.data.rank_loader import RankLoader
from onecurve.data.streams import StreamLoader

SAMPLES = 12


class Stream(IterableDataset[int]):
    """Shuffles itself, as the documentation of torch shows it."""

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        yield from np.random.default_rng(info.seed).permutation(SAMPLES).tolist()


class Noise(Dataset[float]):
    rng: np.random.Generator

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> float:
        return self.rng.random()


def _make_generator(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


def of_stream(seed: int) -> StreamLoader:
    return StreamLoader(DataLoader(Stream(), SAMPLES), SAMPLES, lambda count: [torch.arange(count)], 1, seed)


def of_samples(seed: int, **options: Any) -> RankLoader:
    loader = DataLoader(Noise(), SAMPLES, num_workers=1, worker_init_fn=_make_generator, **options)
    batches = TrainingBatches(lambda epoch: torch.arange(SAMPLES)[None], Division(virtual_ranks=1), 1)
    return RankLoader(loader, batches, seed, torch.device("cpu"))


@pytest.mark.parametrize("make", [of_stream, of_samples])
def test_a_worker_has_another_seed_in_each_epoch_and_run(make: Callable[[int], Any]) -> None:
    def read(seed: int, epoch: int) -> list[float]:
        loader = make(seed)
        loader.sampler.set_epoch(epoch)
        ((part,),) = loader
        return cast(Tensor, part.batch).tolist()

    first = read(0, 0)
    assert first == read(0, 0)
    assert first != read(0, 1)
    assert first != read(1, 0)


def test_persistent_workers_of_a_resumed_run_have_the_seeds_of_the_first_epoch() -> None:
    def seed_of_workers(loader: RankLoader, epoch: int) -> int:
        loader.sampler.set_epoch(epoch)
        ((_,),) = loader
        return cast(Any, loader._loader)._iterator._base_seed

    whole, resumed = (of_samples(0, persistent_workers=True) for _ in range(2))
    first = seed_of_workers(whole, 0)
    assert seed_of_workers(whole, 1) == first
    assert seed_of_workers(resumed, 1) == first


class SeedOfWorker(Noise):
    """Makes a generator for each sample from the seed of its worker, which torch.initial_seed is too."""

    def __getitem__(self, index: int) -> float:
        info: Any = get_worker_info()
        return np.random.default_rng(info.seed if info else torch.initial_seed()).random()


def test_a_sample_has_the_same_seed_in_any_worker() -> None:
    def read(workers: int) -> list[Any]:
        loader = DataLoader(SeedOfWorker(), 2, num_workers=workers)
        batches = TrainingBatches(lambda epoch: torch.arange(SAMPLES).view(-1, 2), Division(virtual_ranks=1), 6)
        return [cast(Tensor, part.batch).tolist() for (part,) in RankLoader(loader, batches, 0, torch.device("cpu"))]

    assert read(0) == read(1) == read(2)
