"""What samplers of users yield: a function of (seed, epoch), or a refusal in one line."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, TensorDataset

from onecurve.data.layout import Division
from onecurve.data.loaders import TrainingLoaders, loaders_of
from onecurve.data.orders import draw, is_repeatable, order_of
from onecurve.data.rank_loader import check_repeatable
from onecurve.errors import UserError

DATASET = TensorDataset(torch.arange(40))


class Buckets:
    """Batches of neighbors, in a list that it shuffles in place."""

    def __init__(self, dataset: Any = DATASET, count: int = 10) -> None:
        self.dataset = dataset
        self.batches = [list(range(4 * number, 4 * number + 4)) for number in range(count)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self.batches)
        return iter(self.batches)


class OwnGenerator(Buckets):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.rng = generator

    def __iter__(self) -> Iterator[list[int]]:
        self.rng.shuffle(self.batches)
        return iter(self.batches)


class Nested(OwnGenerator):
    """Its generator is an attribute of an attribute, so a copy would have another one."""

    def __init__(self) -> None:
        super().__init__(OwnGenerator(random.Random(0)))

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.rng)


class Counting(Buckets):
    """Seeds a generator with the number of its own iterations."""

    passes = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.passes += 1
        return iter(random.Random(self.passes).sample(self.batches, len(self.batches)))


class Uncopied(Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, position: int) -> Any:
        return torch.zeros(2)

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the dataset is copied")


def orders(loader: DataLoader[Any], *epochs: int) -> list[Any]:
    return [[batch.tolist() for batch in order_of(loader, 5, epoch)] for epoch in epochs]


def test_a_list_shuffled_in_place_begins_anew_in_each_epoch() -> None:
    loader: Any = DataLoader(DATASET, batch_sampler=Buckets())
    check_repeatable(loader, 5, "train_dataloader")
    first, second, again = orders(loader, 0, 1, 0)
    assert first == again != second
    assert sorted(first) == sorted(second) == Buckets().batches
    assert loader.batch_sampler.batches == Buckets().batches, "the sampler of the user has not changed"


@pytest.mark.parametrize("count", [1, 2])
def test_few_batches_have_the_same_order_by_chance(count: int) -> None:
    assert all(is_repeatable(Buckets(count=count), seed, has_batches=True) for seed in range(20))


class CountingAtTheEnd(Counting):
    def __iter__(self) -> Iterator[list[int]]:
        yield from random.Random(self.passes).sample(self.batches, len(self.batches))
        self.passes += 1


@pytest.mark.parametrize(
    "sampler",
    [OwnGenerator(np.random.default_rng(0)), OwnGenerator(random.Random(0)), Nested(), Counting(), CountingAtTheEnd()],
    ids=["numpy", "python", "nested", "counting", "counting at the end"],
)
def test_refuses_a_generator_of_its_own(sampler: Any) -> None:
    with pytest.raises(UserError, match=f"{type(sampler).__name__} has a random generator of its own"):
        check_repeatable(DataLoader(DATASET, batch_sampler=sampler), 0, "train_dataloader")


class OfRank(Buckets):
    """Divides itself by rank when it is iterated."""

    def __len__(self) -> int:
        return len(self.batches) // dist.get_world_size()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches[dist.get_rank() :: dist.get_world_size()])


def test_a_sampler_gives_each_rank_the_samples_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    (batches,) = orders(DataLoader(DATASET, batch_sampler=OfRank()), 0)
    assert batches == Buckets().batches


class Endless(Buckets):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield from self.batches


def test_the_length_of_a_sampler_ends_an_epoch() -> None:
    (batches,) = orders(DataLoader(DATASET, batch_sampler=Endless()), 0)
    assert batches == Buckets().batches


class WithoutLength:
    def __init__(self, *indices: Any, repeats: bool = False) -> None:
        self.indices, self.repeats = indices, repeats

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self.indices) if self.repeats else iter(self.indices)


def loader_without_length(repeats: bool, has_batches: bool) -> Any:
    sampler = WithoutLength(*([0, 1], [2, 3]) if has_batches else (0, 1, 2, 3), repeats=repeats)
    return DataLoader(DATASET, batch_sampler=sampler) if has_batches else DataLoader(DATASET, 2, sampler=sampler)


@pytest.mark.parametrize("has_batches", [False, True])
def test_a_sampler_without_a_length_has_an_end(has_batches: bool) -> None:
    of_module = L.LightningDataModule.from_datasets(DATASET)
    of_module.train_dataloader = lambda: loader_without_length(False, has_batches)  # type: ignore[method-assign]
    training = TrainingLoaders(loaders_of(of_module, "train", 0), Division(virtual_ranks=1), 0, None)
    assert (training.batch_size, training.steps) == (2, 2)
    with pytest.raises(UserError, match="WithoutLength has no end: give it a __len__, which ends an epoch"):
        order_of(loader_without_length(True, has_batches), 0, 0)


class OfAnySize(Buckets):
    """Draws how many batches there are, also if it is asked."""

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[list[int]]:
        positions = list(range(40))
        while positions:
            size = random.randint(1, 5)
            yield positions[:size]
            del positions[:size]


def test_a_length_that_is_drawn_is_that_of_the_epoch() -> None:
    for batches in orders(DataLoader(DATASET, batch_sampler=OfAnySize()), *range(12)):
        assert [position for batch in batches for position in batch] == list(range(40))


class Windows(Dataset[Any]):
    """Has a window from each row on that has three behind it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, position: int) -> Any:
        if position > 36:
            raise IndexError(position)
        return torch.arange(position, position + 4) * torch.ones((), dtype=torch.complex64).conj()


def test_fetches_what_the_sampler_gives(caplog: pytest.LogCaptureFixture) -> None:
    """Also samples that are conjugates, whose bytes torch does not show."""
    check_repeatable(DataLoader(Windows(), 4, sampler=range(37)), 0, "train_dataloader")
    assert not caplog.text


class Ragged(Dataset[Any]):
    rng = random.Random(0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, position: int) -> Any:
        return torch.full((position // 4,), self.rng.random())


def test_warns_of_a_generator_of_samples_that_only_their_batch_joins(caplog: pytest.LogCaptureFixture) -> None:
    loader: Any = DataLoader(Ragged(), batch_sampler=Buckets())
    check_repeatable(loader, 0, "train_dataloader")
    assert "Ragged has a random generator or a state of its own" in caplog.text


class Augmented(Dataset[Any]):
    """Draws for the last of its classes from a generator of its own."""

    rng = random.Random(0)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, position: int) -> float:
        return self.rng.random() if position >= 30 else 0.0


def test_warns_of_a_generator_that_few_samples_use(caplog: pytest.LogCaptureFixture) -> None:
    check_repeatable(DataLoader(Augmented()), 0, "train_dataloader")
    assert "Augmented has a random generator or a state of its own" in caplog.text


def test_copies_no_dataset() -> None:
    dataset = Uncopied()
    sampler: Any = Buckets(dataset)
    sampler.of_length = dataset.__len__
    loader: Any = DataLoader(dataset, batch_sampler=sampler)
    first, again = orders(loader, 0, 0)
    assert first == again


def test_a_sampler_that_cannot_be_copied_yields_itself() -> None:
    sampler: Any = Buckets()
    sampler.progress = iter_of_nothing()
    assert len(draw(sampler, 0, 0, has_batches=True)) == 10


def iter_of_nothing() -> Iterator[int]:
    yield from ()


@pytest.mark.parametrize(("drawn", "has_batches"), [([(3, 224)], False), ([1.5], False), ([["a"]], True), ([7], True)])
def test_refuses_what_is_no_position(drawn: Any, has_batches: bool) -> None:
    with pytest.raises(UserError, match=r"list yields what is not the index of a sample .* let it yield integers"):
        draw(drawn, 0, 0, has_batches=has_batches)


def test_takes_integers_of_any_library() -> None:
    order: Any = draw([np.int64(3), torch.tensor(1), 2], 0, 0)
    assert order.tolist() == [3, 1, 2]
