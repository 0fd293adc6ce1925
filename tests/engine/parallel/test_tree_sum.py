"""Sums over virtual ranks have the bits of one tree, whatever divides them among ranks."""

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from onecurve.parallel import tree_sum
from onecurve.parallel.tree_sum import TreeSum, nodes_of, sum_over_ranks
from tests.support.pool import Pool

COUNT = 8  # virtual ranks
SHAPES = [((3, 5), torch.float32), ((7,), torch.float64), ((), torch.float32), ((2, 2), torch.complex64)]


def tensors_of(number: int) -> list[Tensor]:
    """Return what a virtual rank adds: numbers of very different sizes, whose sum depends on the order."""
    generator = torch.Generator().manual_seed(number)
    return [10 ** (4 * torch.randn(shape, generator=generator)) * torch.ones((), dtype=kind) for shape, kind in SHAPES]


def expected() -> list[Tensor]:
    """Return ((v0 + v1) + (v2 + v3)) + ((v4 + v5) + (v6 + v7))."""
    sums = [tensors_of(number) for number in range(COUNT)]
    while len(sums) > 1:
        sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def add(virtual_ranks: Sequence[int]) -> TreeSum:
    tree = TreeSum()
    for number in virtual_ranks:
        tree.add(tensors_of(number), number)
    return tree


def test_any_order_has_the_same_bits() -> None:
    for order in itertools.islice(itertools.permutations(range(COUNT)), 0, None, 997):
        ((key, found),) = add(order).nodes.items()
        assert key == (0, COUNT)
        assert all(map(torch.equal, found, expected()))
    in_a_row = torch.stack([tensors_of(number)[0] for number in range(COUNT)]).cumsum(0)[-1]
    assert not torch.equal(in_a_row, expected()[0])  # the test can fail


def test_few_sums_are_in_memory() -> None:
    tree = TreeSum()
    counts = []
    for number in range(COUNT):
        tree.add(tensors_of(number), number)
        counts.append(len(tree.nodes))
    assert max(counts) == 3  # log2(COUNT)
    assert nodes_of(range(1, 6)) == [(1, 1), (2, 2), (4, 2)]


def sum_of_ranks(of_ranks: list[range], bucket: int) -> list[Tensor]:
    dist.init_process_group("gloo")
    tree_sum._BUCKET, before = bucket, tree_sum._BUCKET
    own = add(of_ranks[dist.get_rank()])
    found = sum_over_ranks(own, of_ranks, dist.group.WORLD)
    tree_sum._BUCKET = before
    return found


@pytest.mark.parametrize("bucket", [1, 40, 1 << 20])  # bytes: each tensor alone, some together, all of one type
@pytest.mark.parametrize(
    "of_ranks", [[range(5), range(5, 6), range(6, 8)], [range(rank, COUNT, 2) for rank in range(2)]], ids=str
)
def test_ranks_have_the_same_bits(of_ranks: list[range], bucket: int, pool: Pool) -> None:
    for found in pool.run(len(of_ranks), sum_of_ranks, of_ranks, bucket):
        assert all(map(torch.equal, found, expected()))
