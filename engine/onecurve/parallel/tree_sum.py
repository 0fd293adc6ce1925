"""Sums over virtual ranks in the order of one balanced binary tree: equal bits, whichever ranks hold them.

Addition in floating point is not associative, so the order decides the last bits. The leaves of the tree are the
virtual ranks. A rank adds the nodes whose virtual ranks it holds; the ranks exchange what is left and add the rest.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onecurve.network.tensors import copy_from_vector, to_vector
from onecurve.observe.step_times import timed_communication
from onecurve.patches.torch import foreach_add_
from onecurve.process.gather import all_gather_into

_BUCKET = 25 << 20  # bytes that are sent at once, of which some copies are in memory


class TreeSum:
    """The sums of lists of tensors, of which each virtual rank has one.

    Two siblings are added at once, so that few lists are in memory, and in any order: a + b has the bits of b + a.

    Attributes:
        nodes: the list of each node without a sibling, by the first virtual rank below the node and their number.
    """

    def __init__(self) -> None:
        self.nodes: dict[tuple[int, int], list[Tensor]] = {}

    @torch.no_grad()
    def add(self, tensors: list[Tensor], first: int, count: int = 1) -> None:
        """Add the node of `count` virtual ranks from `first` on; the tensors belong to this object from now on."""
        while (sibling := self.nodes.pop((first ^ count, count), None)) is not None:
            if tensors:
                foreach_add_(tensors, sibling)
            first, count = min(first, first ^ count), 2 * count
        self.nodes[first, count] = tensors


@timed_communication()
@torch.no_grad()
def sum_over_ranks(own: TreeSum, virtual_ranks: Sequence[Iterable[int]], group: Any) -> list[Tensor]:
    """Return the sums over all virtual ranks, on every rank.

    It moves as many bytes as an all-reduce, if the virtual ranks of a rank are one node of the tree.

    Each rank gets a slice of the nodes of all ranks, adds it, and sends the sum to the others. The tensors of the
    `own` nodes get the sums. `virtual_ranks` are those of each rank of the process group.
    """
    nodes = [tensors for _, tensors in sorted(own.nodes.items())]
    if len(virtual_ranks) == 1:
        return nodes[0]
    nodes_of_ranks = [nodes_of(ranks) for ranks in virtual_ranks]
    for columns in buckets(nodes[0]):
        own_rows = [to_vector([tensors[number] for number in columns]) for tensors in nodes]
        copy_from_vector(_sum_rows(own_rows, nodes_of_ranks, group), [nodes[0][number] for number in columns])
    return nodes[0]


def buckets(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the numbers of tensors of one type that are sent at once."""
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        bucket, nbytes = list[int](), 0
        for number in (number for number, tensor in enumerate(tensors) if tensor.dtype is dtype):
            if nbytes + tensors[number].nbytes > _BUCKET and bucket:
                yield bucket
                bucket, nbytes = [], 0
            bucket.append(number)
            nbytes += tensors[number].nbytes
        yield bucket


def _sum_rows(rows: list[Tensor], nodes: list[list[tuple[int, int]]], group: Any) -> Tensor:
    """Return the sum of the (n,) rows of all ranks, one for each of the nodes of a rank.

    Each rank adds one slice of the rows of all, and then gathers the slices.
    """
    ranks, most_rows, length = len(nodes), max(map(len, nodes)), len(rows[0])
    size = -(-length // ranks)  # of a slice
    padded = rows[0].new_zeros(most_rows, ranks * size)
    for number, row in enumerate(rows):
        padded[number, :length] = row
    sent = padded.view(most_rows, ranks, size).transpose(0, 1).contiguous()  # [i]: the slices that rank i adds
    received = torch.empty_like(sent)  # [i]: those of the rows of rank i
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), group=group)
    tree = TreeSum()
    for rank, keys in enumerate(nodes):
        for number, key in enumerate(keys):
            tree.add([received[rank, number]], *key)
    ((own,),) = tree.nodes.values()
    total = own.new_empty(ranks * size)
    all_gather_into(total.view(torch.uint8), own.contiguous().view(torch.uint8), group=group)
    return total[:length]


def nodes_of(virtual_ranks: Iterable[int]) -> list[tuple[int, int]]:
    """Return the nodes that are left when a rank has added its virtual ranks, in order."""
    tree = TreeSum()
    for number in virtual_ranks:
        tree.add([], number)
    return sorted(tree.nodes)
