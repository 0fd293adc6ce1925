"""Which positions of a global batch each rank holds, by values that were worked out by hand."""

import os
import pickle
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from onecurve.data.layout import (
    BatchLayout,
    DataParallelInfo,
    Division,
    partners,
)
from onecurve.data.module_data import OneProcess, as_one_process
from onecurve.data.ordered_data import OrderedData
from onecurve.errors import UserError


def info(dp_size: int, dp_rank: int = 0, **options: Any) -> DataParallelInfo:
    return DataParallelInfo(dp_size, dp_rank, **options)


def virtual(parallel: DataParallelInfo, count: int, has_pairs: bool = False) -> Division:
    return Division(parallel, 1, count, bit_exact=True, has_pairs=has_pairs)


@pytest.mark.parametrize(
    ("parallel", "count", "expected"),
    [
        (info(1), 8, range(8)),
        (info(1), 1, range(1)),
        (info(4, 1), 8, range(2, 4)),
        (info(3, 0), 8, range(2)),
        (info(3, 1), 8, range(2, 5)),
        (info(3, 2), 8, range(5, 8)),
        (info(4, 3), 2, range(1, 2)),
        (info(4, 0), 2, range(0)),
        (info(2, 0, shares=(3, 1)), 8, range(6)),
        (info(2, 1, shares=(3, 1)), 8, range(6, 8)),
        (info(3, 1, in_turn=True), 8, range(1, 8, 3)),
        (info(2, 0, shares=(3, 1), in_turn=True), 4, range(0, 4, 2)),
    ],
)
def test_virtual_ranks_of_a_rank(parallel: DataParallelInfo, count: int, expected: range) -> None:
    assert list(parallel.virtual_ranks(count)) == list(expected)


@pytest.mark.parametrize(("in_turn", "expected"), [(False, [0, 1]), (True, [0, 2])])
def test_virtual_ranks_of_another_rank(in_turn: bool, expected: list[int]) -> None:
    assert list(info(2, 1, in_turn=in_turn).virtual_ranks(4, rank=0)) == expected


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        (None, info(1)),
        ({"num_replicas": 2, "rank": 1}, info(2, 1)),
        ({"num_replicas": 2, "rank": 1, "shares": [3, 1]}, info(2, 1, shares=(3, 1))),
        ({"num_replicas": 2, "rank": 1, "shares": []}, info(2, 1)),
        ({"num_replicas": 2, "rank": 0, "num_microbatches": 4, "in_turn": True}, DataParallelInfo(2, 0, 4, None, True)),
    ],
)
def test_division_of_a_strategy(kwargs: dict[str, Any] | None, expected: DataParallelInfo) -> None:
    trainer: Any = SimpleNamespace(distributed_sampler_kwargs=kwargs)
    assert OrderedData.parallel.fget(SimpleNamespace(trainer=trainer)) == expected


def test_data_without_a_trainer_have_one_process() -> None:
    data = OrderedData(L.LightningDataModule(), seed=0, limits={})
    assert data.parallel == DataParallelInfo() == DataParallelInfo(1, 0, 1, None, False)


def test_one_process_stands_for_the_trainer() -> None:
    trainer: Any = SimpleNamespace(world_size=8, num_devices=4, num_nodes=2, global_rank=5, local_rank=1, node_rank=1)
    trainer.max_steps, trainer._logger_connector = 100, "a connector"
    one: Any = pickle.loads(pickle.dumps(OneProcess(trainer)))
    assert (one.world_size, one.num_devices, one.num_nodes) == (1, 1, 1)
    assert (one.global_rank, one.local_rank, one.node_rank) == (0, 0, 0)
    assert (one.max_steps, one._logger_connector) == (100, "a connector")
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = one.no_such_name


def test_one_process_hides_the_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    with as_one_process():
        assert (dist.is_initialized(), dist.get_rank(), dist.get_world_size()) == (False, 0, 1)
        assert (dist.get_rank("group"), dist.get_world_size("group")) == (0, 1)  # type: ignore[arg-type]
        assert "RANK" not in os.environ
    assert (dist.is_initialized(), dist.get_rank(), dist.get_world_size()) == (True, 3, 4)
    assert os.environ["RANK"] == "3"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (BatchLayout(4), [[0, 1, 2, 3]]),
        (BatchLayout(1), [[0]]),
        (BatchLayout(8, info(2, 0)), [[0, 2, 4, 6]]),
        (BatchLayout(8, info(2, 1)), [[1, 3, 5, 7]]),
        (BatchLayout(7, info(3, 0)), [[0, 3, 6]]),
        (BatchLayout(7, info(3, 2)), [[2, 5]]),
        (BatchLayout(8, info(2, 0, shares=(3, 1))), [[0, 1, 2, 4, 5, 6]]),
        (BatchLayout(8, info(2, 1, shares=(3, 1))), [[3, 7]]),
        (BatchLayout(8, info(2, 0), accumulate=2), [[0, 4], [1, 5]]),
        (BatchLayout(8, info(2, 1), accumulate=2), [[2, 6], [3, 7]]),
        (BatchLayout(8, info(1, num_microbatches=2)), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (BatchLayout(8, info(2, 1, num_microbatches=2)), [[2, 3, 6, 7]]),
        (BatchLayout(16, info(2, 0, num_microbatches=2), accumulate=2), [[0, 1, 8, 9], [2, 3, 10, 11]]),
        (BatchLayout(18, info(3, 1, num_microbatches=3), accumulate=2), [[6, 7, 8], [9, 10, 11]]),
    ],
)
def test_positions(layout: BatchLayout, expected: list[list[int]]) -> None:
    assert layout.positions.tolist() == expected
    assert layout.positions.dtype == torch.int64


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (BatchLayout(8, virtual_ranks=2), [[0, 2, 4, 6, 1, 3, 5, 7]]),
        (BatchLayout(9, virtual_ranks=3), [[0, 3, 6, 1, 4, 7, 2, 5, 8]]),
        (BatchLayout(8, info(2, 1), virtual_ranks=4), [[1, 5, 3, 7]]),
        (BatchLayout(8, accumulate=2, virtual_ranks=4), [[0, 4, 2, 6], [1, 5, 3, 7]]),
        (BatchLayout(8, accumulate=2, virtual_ranks=2), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (BatchLayout(8, accumulate=2, virtual_ranks=1), [[0, 2, 4, 6], [1, 3, 5, 7]]),
        (BatchLayout(8, accumulate=2, virtual_ranks=3), [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ],
)
def test_samples_of_a_micro_batch_are_ordered_by_group(layout: BatchLayout, expected: list[list[int]]) -> None:
    assert layout.positions.tolist() == expected


@pytest.mark.parametrize(
    ("layout", "positions", "expected"),
    [
        (BatchLayout(8, info(2, 0), has_pairs=True), [0, 2, 4, 6], [2, 3, 0, 1]),
        (BatchLayout(12, info(4, 0), has_pairs=True), [0, 4, 6, 10], [2, 3, 0, 1]),
        (BatchLayout(12, info(4, 3), has_pairs=True), [3, 9], [1, 0]),
        (BatchLayout(8, virtual_ranks=2, has_pairs=True), [0, 2, 4, 6, 1, 3, 5, 7], [2, 3, 0, 1, 6, 7, 4, 5]),
        (BatchLayout(4, has_pairs=True), [0, 1, 2, 3], [2, 3, 0, 1]),
    ],
)
def test_partners_are_half_a_batch_apart_on_one_rank(
    layout: BatchLayout, positions: list[int], expected: list[int]
) -> None:
    assert layout.positions[0].tolist() == positions
    assert layout.partners.tolist() == expected
    assert partners(layout, torch.device("cpu")).tolist() == expected
    device = torch.device("meta")
    assert partners(layout, device).device == device
    assert partners(layout, device) is partners(layout, device), "a transfer would need a synchronization"


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (BatchLayout(10, info(3), virtual_ranks=2), [[2, 2], [1, 2], [2, 1]]),
        (BatchLayout(10, info(3)), [[4], [3], [3]]),
        (BatchLayout(20, info(3), accumulate=2), [[4], [3], [3]]),
        (BatchLayout(8, info(2, shares=(3, 1)), virtual_ranks=2), [[4, 2], [0, 2]]),
        (BatchLayout(8, info(2), virtual_ranks=2), [[4, 0], [0, 4]]),
        (BatchLayout(4, virtual_ranks=8), [[1, 1, 1, 1, 0, 0, 0, 0]]),
    ],
)
def test_counts_of_ranks_and_groups(layout: BatchLayout, expected: list[list[int]]) -> None:
    assert layout.counts.tolist() == expected


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (BatchLayout(8), (1, True, False, 8, 8.0)),
        (BatchLayout(10, info(3, 0)), (1, True, True, 4, 10 / 3)),
        (BatchLayout(10, info(3, 1)), (1, True, True, 3, 10 / 3)),
        (BatchLayout(12, info(2, 0), accumulate=3), (3, False, False, 2, 2.0)),
        (BatchLayout(12, info(2, 0), accumulate=3, virtual_ranks=6), (3, True, False, 2, 2.0)),
        (BatchLayout(8, info(2, 0, num_microbatches=2)), (2, False, False, 4, 4.0)),
        (BatchLayout(24, info(2, 1, num_microbatches=3), accumulate=2), (6, False, False, 6, 6.0)),
        (BatchLayout(8, info(2, 1, shares=(3, 1))), (1, True, True, 2, 4.0)),
        (BatchLayout(8, info(2, 1, shares=(1, 3))), (1, True, True, 6, 4.0)),
    ],
)
def test_sizes(layout: BatchLayout, expected: tuple[int, bool, bool, int, float]) -> None:
    found = (layout.micro_batches, layout.has_whole_groups, layout.is_uneven, layout.samples_per_batch)
    assert (*found, layout.mean_samples_per_batch) == expected


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (
            126,
            {"accumulate": 4},
            "data.batch_size=126 does not divide over 4 micro-batches: set data.batch_size=124 or 128, or "
            "change trainer.accumulate_grad_batches or the number of micro-batches",
        ),
        (
            3,
            {"accumulate": 4},
            "data.batch_size=3 does not divide over 4 micro-batches: set data.batch_size=4, or "
            "change trainer.accumulate_grad_batches or the number of micro-batches",
        ),
        (
            33,
            {"has_pairs": True},
            "data.batch_size=33 does not divide over pairs of samples, which data.augment.mixup and cutmix mix: set "
            "data.batch_size=32 or 34, or change trainer.accumulate_grad_batches or the number of micro-batches",
        ),
        (
            10,
            {"has_pairs": True, "accumulate": 2},
            "data.batch_size=10 does not divide over 2 micro-batches of pairs of samples, which data.augment.mixup and "
            "cutmix mix: set data.batch_size=8 or 12, or change trainer.accumulate_grad_batches or the number of "
            "micro-batches",
        ),
        (
            2,
            {"accumulate": 2},
            "data.batch_size=2 leaves one of 2 data-parallel ranks without a sample in each of 2 micro-batches: raise "
            "it, or change trainer.devices or strategy.shares",
        ),
    ],
)
def test_messages_about_a_batch(batch: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        BatchLayout(batch, info(2), **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("shares", [(1,), (1, 1, 1), (2, 0), (2, -1), (1.5, 1)])
def test_shares_are_a_positive_integer_for_each_rank(shares: tuple[Any, ...]) -> None:
    with pytest.raises(UserError) as caught:
        BatchLayout(8, info(2, shares=shares))
    message = f"strategy.shares={list(shares)}: give a positive integer for each of the 2 data-parallel ranks"
    assert str(caught.value) == message


def test_a_batch_of_one_sample_per_rank_is_accepted() -> None:
    assert BatchLayout(4, info(4, 3)).positions.tolist() == [[3]]
    assert BatchLayout(8, info(4, 1), accumulate=2).positions.tolist() == [[2], [3]]


def test_layouts_of_virtual_ranks() -> None:
    assert [layout.positions.tolist() for layout in virtual(info(2, 1), 4).layouts(8)] == [[[2, 6]], [[3, 7]]]
    assert [layout.positions.tolist() for layout in virtual(info(1), 1).layouts(5)] == [[[0, 1, 2, 3, 4]]]
    (pair,) = virtual(info(2, 0), 2, has_pairs=True).layouts(4)
    assert pair.partners.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("batch", "parallel", "count", "has_pairs", "message"),
    [
        (
            9,
            info(1),
            3,
            False,
            "bit_exact=true: virtual_ranks=3 must be a power of two",
        ),
        (
            6,
            info(1),
            4,
            False,
            "bit_exact=true: 4 must divide data.batch_size=6, for virtual_ranks=4: set the batch size 4 or 8, or other "
            "virtual_ranks",
        ),
        (
            12,
            info(1),
            4,
            True,
            "bit_exact=true: 8 must divide data.batch_size=12, for virtual_ranks=4: set the batch size 8 or 16, or "
            "other virtual_ranks",
        ),
        (
            8,
            info(3),
            2,
            False,
            "bit_exact=true: virtual_ranks=2 leaves one of 3 data-parallel ranks without one: use fewer "
            "trainer.devices, or raise virtual_ranks, which is another experiment",
        ),
    ],
)
def test_messages_about_virtual_ranks(
    batch: int, parallel: DataParallelInfo, count: int, has_pairs: bool, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        virtual(parallel, count, has_pairs).layouts(batch)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("division", "positions", "weight"),
    [
        (Division(), [[0, 4, 1, 5, 2, 6, 3, 7]], 1.0),
        (Division(info(2, 1), accumulate=2, virtual_ranks=2), [[2, 6], [3, 7]], 1.0),
        (Division(info(3, 0), virtual_ranks=1), [[0, 3, 6]], 9 / 8),
        (Division(info(3, 2), virtual_ranks=1), [[2, 5]], 6 / 8),
        (Division(info(2, 1), accumulate=2, virtual_ranks=4, bit_exact=True), [[2, 6], [3, 7]], 1.0),
        (Division(info(2, 0, shares=(3, 1)), virtual_ranks=4, bit_exact=True), [[0, 4], [1, 5], [2, 6]], 1.0),
        (Division(info(4, 0), virtual_ranks=1, has_pairs=True), [[0, 4]], 1.0),
        (Division(info(3, 0), virtual_ranks=1, has_pairs=True), [[0, 3, 4, 7]], 1.5),
    ],
)
def test_division_of_eight_samples(division: Division, positions: list[list[int]], weight: float) -> None:
    assert division.positions(8).tolist() == positions
    assert division.weight(8) == pytest.approx(weight)


@pytest.mark.parametrize(
    ("division", "parts", "sharing", "is_divided", "own"),
    [
        (Division(), 1, 1, False, [0, 1, 2, 3]),
        (Division(info(2, 1)), 1, 2, True, [2, 3]),
        (Division(accumulate=3), 3, 3, True, [0, 1, 2, 3]),
        (Division(info(2, 0), accumulate=3, virtual_ranks=8), 3, 6, True, [0, 1, 2, 3]),
        (Division(info(2, 0), bit_exact=True), 2, 2, False, [0, 1]),
        (Division(bit_exact=True), 4, 1, False, [0, 1, 2, 3]),
    ],
)
def test_parts_of_a_division(division: Division, parts: int, sharing: int, is_divided: bool, own: list[int]) -> None:
    assert (division.num_parts, division.sharing, division.is_divided) == (parts, sharing, is_divided)
    assert list(division.own_virtual_ranks) == own


def test_pairs_of_a_division_stay_on_a_virtual_rank() -> None:
    layouts = Division(info(2, 0), virtual_ranks=2, bit_exact=True, has_pairs=True).layouts(4)
    assert [layout.has_pairs for layout in layouts] == [True]


@pytest.mark.parametrize("frozen", [info(2), BatchLayout(4), Division()])
def test_layouts_do_not_change(frozen: Any) -> None:
    """They are keys of a cache."""
    assert isinstance(hash(frozen), int)
    with pytest.raises(FrozenInstanceError):
        frozen.parallel = frozen.dp_size = None
