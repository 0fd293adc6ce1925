"""PowerSGD (Vogels et al., 2019): the mean of gradients by two thin factors, with error feedback."""

import torch
import torch.distributed as dist
from torch import Tensor


class LowRank:
    """Averages gradients approximately, and adds what the approximation missed to the next gradient.

    Args:
        rank: columns of the factors. A gradient of m rows and n columns becomes factors of (m, rank) and (n, rank).
        feedback: whether to add the errors to the next gradient.
    """

    def __init__(self, rank: int, feedback: bool) -> None:
        self.rank, self.feedback = rank, feedback
        self.right: dict[Tensor, Tensor] = {}
        self.errors: dict[Tensor, Tensor] = {}

    def average(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the approximate mean over the ranks; the same on all of them, as it is made of averages."""
        if gradient.ndim < 2:
            return average(gradient)  # a bias is small
        matrix = gradient.flatten(1)
        if weight not in self.right:
            generator = torch.Generator().manual_seed(0)  # the same numbers on all ranks
            size = (matrix.shape[1], min(self.rank, *matrix.shape))
            self.right[weight] = torch.randn(size, dtype=matrix.dtype, generator=generator)
            self.errors[weight] = torch.zeros_like(matrix)
        if self.feedback:
            matrix = matrix + self.errors[weight]
        left, _ = torch.linalg.qr(average(matrix @ self.right[weight]))  # orthonormal columns
        self.right[weight] = average(matrix.T @ left)  # also the start of the next step
        sent = left @ self.right[weight].T
        self.errors[weight] = matrix - sent
        return sent.view_as(gradient)


def average(tensor: Tensor) -> Tensor:
    """Return the mean over the ranks. To divide first avoids that a sum in float16 overflows."""
    mean = tensor / dist.get_world_size()
    dist.all_reduce(mean)
    return mean
