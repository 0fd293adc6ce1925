"""How samples are fetched and their generators seeded, and how the number of samples in a batch is found."""

import random
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from onecurve.data import rank_loader
from onecurve.data.batch import StepParts, as_part, batch_of_hooks
from onecurve.data.layout import DataParallelInfo
from onecurve.data.rank_batches import EvaluationBatches
from onecurve.data.rank_loader import RankLoader, SampleAxis, SeededSamples, fetches_batches, find_sample_axis
from onecurve.errors import UserError
from onecurve.random.hashing import hash_ints
from onecurve.random.seeding import seed_generators
from tests.support.draws import KEY, draws, expected_draws


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


class Squares(torch.utils.data.Dataset[int]):
    """A dataset of ten squares, of which the fourth cannot be read."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, position: int) -> int:
        if position == 3:
            raise OSError("cannot read")
        if position == 4:
            raise UserError("data.root is no folder")
        return position**2


class Ready:
    """A dataset that makes its batches itself."""

    move_to = None

    def batches(self, positions: torch.Tensor) -> list[Any]:
        return [("batch", positions.tolist()), "the next one"]


@pytest.mark.parametrize(
    ("batch", "axis", "expected"),
    [
        ([zeros(6, 2)], SampleAxis(0, 0, 1), 6),
        ([zeros(6, 2), zeros(5, 8)], SampleAxis(1, 1, 2), 4),
        ({"a": zeros(3), "b": zeros(9)}, SampleAxis(1, 0, 6), 1.5),
    ],
)
def test_samples_in_a_batch(batch: Any, axis: SampleAxis, expected: float) -> None:
    assert axis.samples_in(batch) == expected


@pytest.mark.parametrize(
    ("pairs", "singles", "expected"),
    [
        ([[zeros(2, 3)]] * 2, [[zeros(1, 3)]] * 2, SampleAxis(0, 0, 1)),
        ([[zeros(2, 3)]], [[zeros(1, 3)]], None),
        ([[zeros(5, 8)]] * 2, [[zeros(5, 4)]] * 2, SampleAxis(0, 1, 4)),
        ([["text", zeros(6)]] * 2, [["text", zeros(3)]] * 2, SampleAxis(1, 0, 3)),
        ([[zeros(3)]] * 2, [[zeros(1)]] * 2, None),
        ([[zeros(0, 2)]] * 2, [[zeros(0, 1)]] * 2, SampleAxis(0, 1, 1)),
        ([[zeros(0)]] * 2, [[zeros(0)]] * 2, None),
        ([], [], None),
        # A padded length doubles by chance once, and the samples three times.
        (
            [[zeros(2, 8)], [zeros(2, 6)], [zeros(2, 6)]],
            [[zeros(1, 4)], [zeros(1, 4)], [zeros(1, 5)]],
            SampleAxis(0, 0, 1),
        ),
        # The other way around: the largest count wins, not the first axis.
        (
            [[zeros(8, 2)], [zeros(6, 2)], [zeros(8, 2)]],
            [[zeros(4, 1)], [zeros(4, 1)], [zeros(4, 1)]],
            SampleAxis(0, 1, 1),
        ),
        # Batches of which the second has fewer leaves or dimensions.
        ([[zeros(2), zeros(2)]] * 2, [[zeros(1)]] * 2, SampleAxis(0, 0, 1)),
        ([[zeros(2, 2)]] * 2, [[zeros(1)]] * 2, SampleAxis(0, 0, 1)),
        # Of equal counts it is the number of samples itself: texts of four tokens, their offsets and labels.
        ([[zeros(8), zeros(2), zeros(2)]] * 2, [[zeros(4), zeros(1), zeros(1)]] * 2, SampleAxis(1, 0, 1)),
        # The list of a sample's boxes shifts the tensors behind it.
        ([[[zeros(3), zeros(6)], zeros(2)]] * 2, [[[zeros(3)], zeros(3)]] * 2, None),
        # A name of its own hides one tensor only.
        ([{"a": zeros(2), "z": zeros(2)}] * 2, [{"b": zeros(1), "z": zeros(1)}] * 2, SampleAxis(1, 0, 1)),
    ],
)
def test_axis_of_the_samples(pairs: list[Any], singles: list[Any], expected: SampleAxis | None) -> None:
    assert find_sample_axis(pairs, singles) == expected


def test_as_many_pairs_as_single_samples() -> None:
    with pytest.raises(ValueError, match="zip"):
        find_sample_axis([[zeros(2)]] * 2, [[zeros(1)]])


def test_each_sample_is_fetched_with_its_key() -> None:
    class Noise(Squares):
        def __getitem__(self, position: int) -> Any:
            return draws()

    samples = SeededSamples(Noise(), lambda items: (items, draws()))
    positions, (items, collated) = samples.__getitems__(torch.tensor([[3, 4], [KEY, 8]]))
    assert positions.tolist() == [3, 4]
    assert items == [expected_draws(KEY), expected_draws(8)]
    assert collated == expected_draws(int(hash_ints(KEY)))


def test_a_dataset_that_seldom_draws_from_pythons_generator() -> None:
    class Seldom(Squares):
        def __getitem__(self, position: int) -> Any:
            return random.random() if position % 5 == 2 else None

    samples = SeededSamples(Seldom(), list)
    for first in (3, 5, 0):  # without a draw, and then with one by the third of four samples
        keys = torch.arange(first, first + 4)
        _, items = samples.__getitems__(torch.stack([torch.arange(first, first + 4), keys]))
        assert items == [random.Random(key).random() if key % 5 == 2 else None for key in keys.tolist()]


def test_a_dataset_that_keeps_what_it_has_drawn() -> None:
    class Kept(Squares):
        def __init__(self) -> None:
            self.drawn: dict[int, float] = {}

        def __getitem__(self, position: int) -> Any:
            return self.drawn.setdefault(position, random.random())

    _, items = SeededSamples(Kept(), list).__getitems__(torch.tensor([[3, 4], [KEY, 8]]))
    assert items == [random.Random(key).random() for key in (KEY, 8)]


@pytest.mark.parametrize("is_worker", [True, False])
def test_only_a_process_without_workers_keeps_its_generators(is_worker: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_loader, "get_worker_info", lambda: SimpleNamespace() if is_worker else None)
    monkeypatch.delattr(torch.cuda, "set_rng_state_all")  # samples leave the generators of GPUs alone
    seed_generators(1)
    SeededSamples(Squares(), list).__getitems__(torch.tensor([[0], [2]]))
    assert draws() == expected_draws(int(hash_ints(2)) if is_worker else 1)


def test_a_dataset_may_make_its_batches() -> None:
    assert fetches_batches(Ready())
    assert not fetches_batches(SimpleNamespace(batches=1))
    assert not fetches_batches(SimpleNamespace(move_to=1))
    positions, batch = SeededSamples(Ready(), list).__getitems__(torch.tensor([[3, 4], [7, 8]]))
    assert positions.tolist() == [3, 4]
    assert batch == ("batch", [[3, 4]])


class Movable(Squares):
    """Counts how often its samples are moved to a device."""

    batches, moves = None, 0

    def move_to(self, device: torch.device) -> bool:
        self.moves += 1
        return True


@pytest.mark.parametrize(("workers", "moves"), [(0, 1), (1, 0)])
def test_samples_that_workers_fetch_are_not_moved_to_the_device(workers: int, moves: int) -> None:
    """A forked worker cannot use CUDA."""
    dataset = Movable()
    batches = EvaluationBatches(torch.arange(10), 5, DataParallelInfo())
    RankLoader(DataLoader(dataset, 5, num_workers=workers), batches, 0, torch.device("cpu"))
    assert dataset.moves == moves


@pytest.mark.parametrize("width", [1, 3])
def test_a_part_of_a_batch_must_keep_its_samples(width: int) -> None:
    """The message has the number of samples that the axis finds; without an axis or parts nothing is checked."""
    batches: dict[str, Any] = {"dataset": Squares(), "collate": lambda items: [zeros(2, width * len(items))]}
    positions = torch.tensor([[0, 1], [7, 8]])
    with pytest.raises(UserError) as caught:
        SeededSamples(**batches, is_divided=True, axis=SampleAxis(0, 1, 2)).__getitems__(positions)
    assert str(caught.value) == (
        f"collate_fn makes a batch of {width} samples from 2, so the curve would depend on the number of processes: "
        "leave samples out in the dataset, or set bit_exact=true"
    )
    for options in (
        {"axis": SampleAxis(0, 1, 2)},
        {"is_divided": True},
        {"is_divided": True, "axis": SampleAxis(0, 1, width)},
    ):
        SeededSamples(**batches, **options).__getitems__(positions)


@pytest.mark.parametrize("axis", [None, SampleAxis(0, 0, 1)])
def test_a_part_of_a_batch_must_not_be_left_out(axis: SampleAxis | None) -> None:
    """Lightning skips the step of a batch that is None, on the rank alone that has it."""
    positions = torch.tensor([[0, 1], [7, 8]])
    samples = SeededSamples(Squares(), lambda items: None, is_divided=True, axis=axis)
    parts = StepParts([as_part(*samples.__getitems__(positions))])
    with pytest.raises(UserError, match=r"collate_fn returns None for the samples of a process, .* out in the dataset"):
        batch_of_hooks(parts, bit_exact=False, is_divided=True)
    assert batch_of_hooks(parts, bit_exact=False) is None


def test_collate_must_not_draw_for_a_part() -> None:
    samples = SeededSamples(Squares(), lambda items: draws(), is_divided=True)
    with pytest.raises(UserError) as caught:
        samples.__getitems__(torch.tensor([[0], [7]]))
    assert str(caught.value) == (
        "collate_fn draws random numbers for the samples of one process, so the curve would depend on the number of "
        "processes: draw them in the dataset, for each sample, or set bit_exact=true"
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
def test_an_error_names_the_sample_of_the_whole_dataset() -> None:
    subset = Subset(Subset(Squares(), [9, 3, 5]), [2, 1])
    with pytest.raises(OSError, match="cannot read") as caught:
        SeededSamples(subset, list).__getitems__(torch.tensor([[1], [7]]))
    assert caught.value.__notes__ == ["This is sample 3 of Squares."]


def test_an_error_of_the_user_has_no_note() -> None:
    with pytest.raises(UserError, match="is no folder") as caught:
        SeededSamples(Squares(), list).__getitems__(torch.tensor([[4], [7]]))
    assert not hasattr(caught.value, "__notes__")


class Noise(torch.utils.data.Dataset[list[float]]):
    def __getitem__(self, position: int) -> list[float]:
        return [position, *draws()]


def fetch(positions: list[int], keys: list[int], is_divided: bool = False) -> tuple[list[list[float]], list[float]]:
    """Return the samples of a batch, and what `collate_fn` draws."""
    samples = SeededSamples(Noise(), lambda items: (items, draws() if not is_divided else []), is_divided)
    return samples.__getitems__(torch.tensor([positions, keys]))[1]


def test_the_key_of_a_sample_gives_its_numbers() -> None:
    one, two, again = fetch([3, 4], [7, 8])[0], fetch([4, 3], [8, 7])[0], fetch([3], [9])[0]
    assert one == two[::-1]
    assert one[0][1:] != one[1][1:]
    assert again[0] != one[0]


def test_the_key_of_the_first_sample_gives_the_numbers_of_the_batch() -> None:
    assert fetch([3, 4], [7, 8])[1] == fetch([5, 6], [7, 9])[1]
    assert fetch([3, 4], [7, 8])[1] != fetch([3, 4], [8, 7])[1], "each batch has numbers of its own"
    (sample, _), collated = fetch([3, 4], [7, 8])
    assert not {*sample} & {*collated}, "they are not those of the sample's transforms"


def test_fetching_leaves_the_generators_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    fetch([1], [2])
    assert torch.equal(torch.rand(3), expected)


def test_fetched_samples_are_themselves_only() -> None:
    one, other = SeededSamples(Squares(), list), SeededSamples(Squares(), list)
    assert len({one, other}) == 2
