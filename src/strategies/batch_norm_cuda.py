"""Synchronized batch normalization from torch's CUDA kernels, without host-device synchronization.

torch's SyncBatchNorm selects the ranks with samples by a boolean mask, for which the host waits three times per layer
(https://github.com/pytorch/pytorch/issues/78549). Here every rank has the same number of samples.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from src.utils.timeline import communication

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the older name is deprecated


class NormalizeOnCUDA(torch.autograd.Function):
    """Normalization of an (n, channels, ...) input by the moments of all ranks, which also update the running ones.

    The running mean and variance, of shape (channels,), have the type of the kernels' moments: float32 for half
    precision, otherwise the type of the input. The gradients of weight and bias are those of this rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor,
        running_var: Tensor,
        momentum: float,
        eps: float,
        group: Any,
    ) -> Tensor:
        input, ranks = _dense(input), dist.get_world_size(group)
        own = torch.cat(torch.batch_norm_stats(input, eps))
        gathered = own.new_empty(ranks * len(own))
        with communication():
            _all_gather(gathered, own, group=group)
        means, inv_stds = gathered.view(ranks, 2, -1).unbind(1)
        # The variant with one count for all ranks copies it from the host's memory, for which the host waits.
        counts = own.new_full((ranks,), input.numel() // input.shape[1])
        merge = _merge_in_graph if torch.compiler.is_compiling() else torch.batch_norm_gather_stats_with_counts
        mean, inv_std = merge(input, means, inv_stds, running_mean, running_var, momentum, eps, counts)
        ctx.save_for_backward(input, weight, mean, inv_std)
        ctx.group = group
        return torch.batch_norm_elemt(input, weight, bias, mean, inv_std, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, inv_std = ctx.saved_tensors
        grad_output, needs = _dense(gradients[0]), ctx.needs_input_grad[:3]
        *sums, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
            grad_output, input, mean, inv_std, weight, *needs
        )
        grad_input = None
        if needs[0]:
            sum_g, sum_gx = _sum_over_ranks(sums, ctx.group)
            count = input.numel() // input.shape[1] * dist.get_world_size(ctx.group)
            counts = torch.full((1,), count, dtype=torch.int32, device=input.device)
            weight = None if weight is None else weight.to(mean.dtype)
            grad_input = torch.batch_norm_backward_elemt(
                grad_output, input, mean, inv_std, weight, sum_g, sum_gx, counts
            )
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


@torch.library.custom_op("project::merge_batch_norm_stats", mutates_args=("running_mean", "running_var"))
def _merge_in_graph(
    input: Tensor,
    means: Tensor,
    inv_stds: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Call torch's kernel, which does not declare to a compiler that it changes the running statistics."""
    return torch.batch_norm_gather_stats_with_counts(
        input, means, inv_stds, running_mean, running_var, momentum, eps, counts
    )


@_merge_in_graph.register_fake
def _(input: Tensor, means: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return means.new_empty(means.shape[1]), means.new_empty(means.shape[1])


def _sum_over_ranks(values: list[Tensor], group: Any) -> tuple[Tensor, ...]:
    flat = torch.cat(values)
    with communication():
        dist.all_reduce(flat, group=group)
    return flat.chunk(len(values))


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor with channels last if it has that format, otherwise contiguous, as the kernels require."""
    formats = (torch.channels_last, torch.channels_last_3d)
    if any(tensor.is_contiguous(memory_format=memory_format) for memory_format in formats):
        return tensor
    return tensor.contiguous()
