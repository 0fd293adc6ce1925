"""Exercises of chapter 10. Replace each `raise`, then run `python -m docs.guide.check 10`."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from docs.guide.experiment import run_ranks


def send_largest(gradient: Tensor, error: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return what is sent of a gradient, with zeros elsewhere, and the new error.

    Args:
        gradient: a vector.
        error: what was not sent before; it is added to the gradient.
        count: how many values are sent: those of the largest magnitude.
    """
    raise NotImplementedError("What is sent and the new error add up to the gradient and the old error.")


def average_in_float16(gradient: Tensor) -> Tensor:
    """Return the mean over the ranks as float32, from one all-reduce in float16, whose largest number is 65504."""
    raise NotImplementedError("When may the sum of the ranks overflow?")


def check_send_largest(solution: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> None:
    gradient, error = torch.tensor([1.0, -4.0, 3.0, 2.0]), torch.zeros(4)
    expected = [[0, -4, 0, 0], [0, 0, 6, 0], [0, -8, 0, 0], [0, 0, 0, 8]]
    for step, row in enumerate(expected):
        sent, error = solution(gradient, error, 1)
        assert sent.tolist() == row, f"step {step + 1} of a constant gradient: sent {sent.tolist()}, expected {row}"
    left = torch.tensor([4.0, -4.0, 6.0, 0.0])
    assert torch.equal(error, left), f"the error after four steps is {error}, expected {left}"
    sent, _ = solution(gradient, torch.zeros(4), 3)
    assert sent.tolist() == [0, -4, 3, 2], f"three values of {gradient.tolist()}: sent {sent.tolist()}"


def check_average_in_float16(solution: Callable[[Tensor], Tensor]) -> None:
    for got, sent in run_ranks(_average_of_large, 2, solution):
        assert sent == torch.float16, f"{sent} was sent instead of float16"
        assert got.dtype == torch.float32, f"got {got.dtype}"
        assert torch.equal(got, torch.tensor([45056.0, 1.5])), f"got {got.tolist()}, expected [45056.0, 1.5]"


def _average_of_large(solution: Callable[[Tensor], Tensor]) -> tuple[Tensor, torch.dtype]:
    sent, all_reduce = [], dist.all_reduce

    def watch(tensor: Tensor) -> None:
        sent.append(tensor.dtype)
        all_reduce(tensor)

    dist.all_reduce = watch
    got = solution(torch.tensor([[40960.0, 1.0], [49152.0, 2.0]])[dist.get_rank()])
    dist.all_reduce = all_reduce
    return got, sent[0]
