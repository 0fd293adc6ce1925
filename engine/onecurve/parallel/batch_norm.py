"""Batch normalization over groups of the global batch, which are the same on any hardware.

Each group is normalized by its own statistics, as in ghost batch normalization (Hoffer et al., "Train longer,
generalize better", 2017; Page, "How to train your ResNet", 2018). A rank that holds whole groups sends nothing. Ranks
that share groups exchange their moments, also on CPUs, which torch's SyncBatchNorm does not support.

The running statistics move once per optimizer step, by the mean over all groups. The copy of each rank follows the
groups that it holds. This update is linear, so the weighted mean of the copies is the statistic of all groups:
`average_statistics` computes it before evaluation, saving and hooks.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onecurve.data.layout import BatchLayout
from onecurve.errors import UserError
from onecurve.network.compilation import constant
from onecurve.network.recomputation import remember
from onecurve.network.tensors import copy_from_vector, to_vector, upcast_half
from onecurve.observe.step_times import timed_communication
from onecurve.patches.torch import AnyBatchNorm, BatchNormOfAnyShape, keep_out_of_ddp
from onecurve.process.gather import all_gather_into

_ADDITIONS = (Tensor.add_, Tensor.__iadd__, Tensor.add, Tensor.__add__)


@dataclass(frozen=True)
class RankGroups:
    """The normalization groups of a micro-batch that this rank, or a rank with which it shares a group, holds.

    Attributes:
        counts: number of samples of each group on each of these ranks, as (ranks, groups).
        sizes: number of samples of each group on this rank.
        totals: number of samples of each group.
        sharing: process group of these ranks; None if this rank holds its groups alone.
        data_parallel: process group of all data-parallel ranks; None if there is one.
        weight: weight of this rank's running statistics in their mean over the data-parallel ranks.
        micro_batches: number of micro-batches per optimizer step.
    """

    counts: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    totals: tuple[int, ...]
    sharing: Any
    data_parallel: Any
    weight: float
    micro_batches: int

    def __deepcopy__(self, _: Any) -> "RankGroups":
        return self  # a process group cannot be copied, and a hook may copy a network


def rank_groups(layout: BatchLayout, data_parallel: Any) -> RankGroups:
    """Return the groups of this rank in a layout of the global batch. Every data-parallel rank must call it."""
    ranks = ranks_that_share(layout)
    held = layout.counts[ranks].any(0)  # (groups,)
    counts = layout.counts[ranks][:, held]
    return RankGroups(
        counts=tuple(map(tuple, counts.tolist())),
        sizes=tuple(layout.counts[layout.parallel.dp_rank, held].tolist()),
        totals=tuple(counts.sum(0).tolist()),
        sharing=_sharing_group(ranks, layout, data_parallel),
        data_parallel=data_parallel,
        weight=int(held.sum()) / held.size / len(ranks),
        micro_batches=layout.micro_batches,
    )


def _sharing_group(ranks: list[int], layout: BatchLayout, data_parallel: Any) -> Any:
    """Return the process group of some data-parallel ranks; None for a rank alone, which needs none."""
    if len(ranks) == layout.parallel.dp_size:
        return data_parallel
    if (np.count_nonzero(layout.counts, axis=0) == 1).all():
        return None
    members = [dist.get_process_group_ranks(data_parallel)[number] for number in ranks]
    # NCCL divides the group of all ranks (`ncclCommSplit`), so each must call it if one does, also a rank alone.
    group = dist.new_group(members, use_local_synchronization=True)
    return group if len(ranks) > 1 else None


def ranks_that_share(layout: BatchLayout) -> list[int]:
    """Return this data-parallel rank, and those with which it shares groups, also through others."""
    holds = layout.counts > 0
    found, known = [layout.parallel.dp_rank], 0
    while known < len(found):  # add the ranks that share a group with one of these
        known = len(found)
        found = np.flatnonzero(holds[:, holds[found].any(0)].any(1)).tolist()
    return found


def apply_norm_groups(net: nn.Module, groups: RankGroups) -> None:
    """Change the class of the batch normalization layers, in place. Parameters, names and hooks stay the same.

    DistributedDataParallel, if it wraps `net`, does not broadcast their running statistics: each rank has its own.
    """
    norms: dict[str, Any] = {name: part for name, part in net.named_modules() if isinstance(part, AnyBatchNorm)}
    for name, norm in norms.items():
        if isinstance(norm, GroupedBatchNorm):
            continue
        if "forward" in vars(norm):
            raise UserError(f"{name}.forward is replaced in the layer itself: give it a class of its own instead")
        norm.class_before, norm.groups, norm.lengths = type(norm), groups, []
        norm.__class__ = _grouped_class(norm.class_before)
        norm.begin_step()
    buffers = [f"{name}.{buffer}" for name, norm in norms.items() for buffer, _ in norm.named_buffers(recurse=False)]
    keep_out_of_ddp(net, buffers)


def revert_norm_groups(net: nn.Module) -> None:
    """Undo `apply_norm_groups`."""
    for norm in list(grouped_norms(net)):
        norm.__class__ = norm.class_before  # type: ignore[assignment]
        # `forward` is there if the layer itself was compiled, with the methods of the other class.
        for name in ("class_before", "groups", "lengths", "is_first_pass", "is_normalized", "is_in_step", "forward"):
            vars(norm).pop(name, None)


def grouped_norms(net: nn.Module) -> Iterator["GroupedBatchNorm"]:
    return (norm for norm in net.modules() if isinstance(norm, GroupedBatchNorm))


@torch.no_grad()
def average_statistics(net: nn.Module) -> None:
    """Replace the running statistics with their weighted means over the data-parallel ranks, which must all call it."""
    norms = [norm for norm in grouped_norms(net) if norm.running_mean is not None]
    if not norms or (groups := norms[0].groups).data_parallel is None:
        return
    statistics: list[Any] = [tensor for norm in norms for tensor in (norm.running_mean, norm.running_var)]
    means = to_vector(statistics) * groups.weight
    dist.all_reduce(means, group=groups.data_parallel)
    copy_from_vector(means, statistics)


class GroupedBatchNorm(AnyBatchNorm):
    """Batch normalization over groups, of an (n, channels, ...) input whose samples are ordered by group.

    A layer keeps its own forward pass, also one such as that of timm's BatchNormAct2d: its `F.batch_norm` normalizes by
    group, and its `num_batches_tracked` counts once per optimizer step.

    Attributes:
        groups: the groups of this rank.
        class_before: the class of the layer before `apply_norm_groups`.
        lengths: values of a channel in a sample, for each forward pass of this step, if the layer is not compiled.
        is_first_pass: whether the next forward pass in training is the first one of its optimizer step.
        is_normalized: whether the forward pass called `F.batch_norm` with the running statistics of the layer.
        is_in_step: not from a validation or an epoch to the next step: hooks such as `update_bn` read whole batches.
    """

    groups: RankGroups
    class_before: type[AnyBatchNorm]
    lengths: list[int]
    is_first_pass: bool
    is_normalized: bool
    is_in_step: bool

    def begin_step(self) -> None:
        """Let the next forward pass be the first one of an optimizer step."""
        self.is_first_pass = self.is_in_step = True
        self.lengths.clear()

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_divided, groups = self.training and self.is_in_step, self.groups
        # One group that a process holds in one piece is what torch's layer normalizes, with fewer kernels.
        is_one = groups.counts == ((len(input),),) or (groups.data_parallel is None and len(groups.totals) == 1)
        if not is_divided or (is_one and groups.micro_batches == 1):
            output: Any = super().forward(input, *args, **kwargs)
        else:
            output = self._forward_in_groups(input, *args, **kwargs)
        # Last: a second pass in torch.utils.checkpoint that ends in `F.batch_norm` moves no statistics.
        if is_divided and not torch.compiler.is_compiling():  # it would compile the layer for each number
            remember(lambda: self.lengths.append(input[:, 0].numel() // sum(groups.sizes)))
            self.check_passes(groups.micro_batches)
        return output

    def _forward_in_groups(self, *args: Any, **kwargs: Any) -> Any:
        self.is_normalized = False
        with _BatchNormCalls(self):
            output = super().forward(*args, **kwargs)
        if not self.is_normalized:
            raise UserError(
                f"{type(self).__name__}.forward does not call F.batch_norm with its own running_mean: divide it into "
                "nn.BatchNorm2d and other layers, or set trainer.sync_batchnorm=false, which is another experiment"
            )
        return output

    def normalize(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Compute `F.batch_norm`, with the layer's own statistics by group in training, which moves them."""
        is_own = running_mean is self.running_mean
        self.is_normalized |= is_own
        if not (is_own and training):
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        normalize = self._normalize_alone if self.groups.sharing is None else self._normalize_shared
        output, moments = normalize(input, self._rows_per_group(input), weight, bias, eps)
        remember(lambda: self._update_running(moments, momentum))
        return output

    def _rows_per_group(self, input: Tensor) -> list[int]:
        """Return the rows of each group: its samples, or several rows of each sample if there is one group."""
        sizes, samples = self.groups.sizes, sum(self.groups.sizes)
        rows, rest = divmod(len(input), samples)
        if rest or (rows > 1 and len(sizes) > 1):
            raise UserError(
                f"a batch normalization layer gets {len(input)} rows for {samples} samples, so their groups are "
                "unknown: give it whole batches, or set virtual_ranks=1 on one process, which is another experiment"
            )
        if min(self.groups.totals) * rows * input[0, 0].numel() == 1:
            raise UserError(
                "a batch normalization layer gets one value per channel and group: set fewer virtual_ranks, or a "
                "larger data.batch_size"
            )
        return [size * rows for size in sizes]

    def _normalize_alone(
        self, input: Tensor, sizes: list[int], weight: Any, bias: Any, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output, and the (groups, 2, channels) moments: means and unbiased variances."""
        like = input if self.running_mean is None else self.running_mean
        moments = like.new_zeros(len(sizes), 2, input.shape[1])
        outputs = [
            F.batch_norm(part, mean, var, weight, bias, True, 1.0, eps)
            for part, (mean, var) in zip(input.split(sizes), moments, strict=True)
        ]
        return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]), moments

    def _normalize_shared(
        self, input: Tensor, sizes: list[int], weight: Any, bias: Any, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the same as `_normalize_alone`, for groups that several ranks share."""
        values_per_row = input[0, 0].numel() * sum(sizes) // sum(self.groups.sizes)
        mean, var = remember(lambda: _moments_over_ranks(input.detach(), sizes, self.groups))
        values = constant(self.groups.totals, mean.dtype, mean.device)[..., None] * values_per_row
        weight = None if weight is None else weight.to(mean.dtype)
        bias = None if bias is None else bias.to(mean.dtype)
        output = _Normalize.apply(input, weight, bias, mean, var, values, eps, sizes, self.groups.sharing)
        return output, torch.stack([mean, var * values / (values - 1)], 1)

    @torch.no_grad()
    def _update_running(self, moments: Tensor, momentum: float) -> None:
        """Add the mean of the groups' moments, in the first pass after the old values have decayed."""
        if self.running_mean is None or self.running_var is None:
            return
        micro_batches, moments = self.groups.micro_batches, moments.mean(0).to(self.running_mean.dtype)
        for running, moment in zip((self.running_mean, self.running_var), moments, strict=True):
            if micro_batches == 1:
                running.lerp_(moment, momentum)
                continue
            if self.is_first_pass:
                running.mul_(1 - momentum)
            running.add_(moment * (momentum / micro_batches))
        self.is_first_pass = micro_batches == 1

    def check_passes(self, limit: int) -> None:
        """Raise a UserError if micro-batches had more: the running statistics would depend on their number."""
        if self.groups.micro_batches > 1 and self.running_mean is not None and len(self.lengths) > limit:
            raise UserError(
                "trainer.accumulate_grad_batches or strategy.microbatches: a batch normalization layer runs more than "
                "once in a forward pass, or again in torch.utils.checkpoint: set it to 1, or use "
                "module.recompute=blocks in place of checkpoint"
            )


class _BatchNormCalls(TorchFunctionMode):
    """Context in which the `normalize` of a layer takes the place of `F.batch_norm`."""

    def __init__(self, norm: GroupedBatchNorm) -> None:
        super().__init__()
        self.norm = norm

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ADDITIONS and args[0] is self.norm.num_batches_tracked and not self.norm.is_first_pass:
            return args[0]  # this step is counted
        call = self.norm.normalize if func is F.batch_norm else func
        return call(*args, **(kwargs or {}))


@functools.cache
def _grouped_class(before: Any) -> type[GroupedBatchNorm]:
    """Return the class of a layer of class `before` that normalizes over groups."""
    base = BatchNormOfAnyShape if before.forward is nn.SyncBatchNorm.forward else before
    return type(before.__name__, (GroupedBatchNorm, base), {})


def _moments_over_ranks(input: Tensor, sizes: list[int], groups: RankGroups) -> tuple[Tensor, Tensor]:
    """Return the (groups, channels) means and biased variances over ranks, without cancellation (Chan et al., 1979)."""
    own = torch.stack([_moments(part) for part in input.split(sizes)])
    gathered = own.new_empty(len(groups.counts) * len(own), *own.shape[1:])
    with timed_communication():
        all_gather_into(gathered, own, group=groups.sharing)
    means, variances = gathered.view(-1, *own.shape).unbind(2)  # (ranks, groups, channels)
    counts = constant(groups.counts, own.dtype, own.device)[..., None]
    fractions = counts / counts.sum(0)
    mean = (fractions * means).sum(0)
    return mean, (fractions * (variances + (means - mean) ** 2)).sum(0)


def _moments(part: Tensor) -> Tensor:
    """Return the (2, channels) mean and biased variance of an (n, channels, ...) input, zeros if it has no rows."""
    values = upcast_half(part)
    if not len(part):
        return values.new_zeros(2, part.shape[1])
    if part.is_cuda:
        return torch.stack(torch.var_mean(values, [0, *range(2, part.ndim)], correction=0)).flip(0)
    return torch.stack(torch.batch_norm_update_stats(values, None, None, 0.0))  # 40 times as fast on a CPU


class _Normalize(torch.autograd.Function):
    """Normalization of an (n, channels, ...) input x by the moments of its groups (Ioffe and Szegedy, 2015).

    Forward, for each group and channel:

        inv_std = 1 / sqrt(var + eps)
        x_hat = (x - mean) * inv_std
        y = weight * x_hat + bias

    Backward, with g = dL/dy, and means over the values of the channel in the group, on all ranks:

        mean_g = mean(g)
        mean_gx = mean(g * x_hat)
        dL/dx = weight * inv_std * (g - mean_g - x_hat * mean_gx)

    The gradients of weight and bias are those of this rank, sum(g * x_hat) and sum(g); the strategy averages them.
    torch's evaluation kernels compute y, the term of g, and the two sums. They treat the moments as constants, so
    the backward pass adds the other terms, as slope * x + shift.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        values: Tensor,
        eps: float,
        sizes: list[int],
        process_group: Any,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, var, values)
        ctx.eps, ctx.sizes, ctx.process_group = eps, sizes, process_group
        parts = zip(input.split(sizes), mean, var, strict=True)
        return torch.cat(
            [torch.native_batch_norm(x, weight, bias, m, v, False, 0.0, eps)[0] for x, m, v in parts if len(x)]
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, var, values = ctx.saved_tensors
        inputs = input.split(ctx.sizes)
        parts = zip(gradients[0].split(ctx.sizes), inputs, mean, var, strict=True)
        of_groups = [_backward(*part, weight, ctx.eps) for part in parts]
        grad_inputs, grad_weights, grad_biases = zip(*of_groups, strict=True)
        sums = torch.stack([torch.stack(grad_weights), torch.stack(grad_biases)])  # (2, groups, channels)
        own = (None, None) if weight is None else sums.sum(1)  # of this rank, before the ranks add theirs
        with timed_communication():
            dist.all_reduce(sums, group=ctx.process_group)
        slope, shift = _terms_of_moments(sums / values, mean, torch.rsqrt(var + ctx.eps), weight)
        per_channel = [-1] + [1] * (input.ndim - 2)
        for grad, x, a, b in zip(grad_inputs, inputs, slope, shift, strict=True):
            grad.addcmul_(x, a.view(per_channel)).add_(b.view(per_channel))
        return torch.cat(grad_inputs), *own, *[None] * 6


def _terms_of_moments(means: Tensor, mean: Tensor, inv_std: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (groups, channels) slope and shift: the moments add slope * x + shift to the gradient of x."""
    mean_gx, mean_g = means  # (groups, channels)
    gamma = 1 if weight is None else weight
    slope = -mean_gx * inv_std * inv_std * gamma
    return slope, -mean_g * inv_std * gamma - slope * mean


def _backward(
    gradient: Tensor, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight and bias, with the moments as constants."""
    if not len(x):
        return torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
    return torch.ops.aten.native_batch_norm_backward(
        gradient, x, weight, mean, var, None, None, False, eps, [True, True, True]
    )
