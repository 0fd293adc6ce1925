"""Batch normalization over the global batch, also on CPUs, which torch's SyncBatchNorm does not support."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from src.strategies.batch_norm_cuda import NormalizeOnCUDA
from src.utils.tensors import upcast_half
from src.utils.timeline import communication


class GlobalBatchNorm(TorchSyncBatchNorm):
    """Lightning's layer synchronization for any device: `Trainer(sync_batchnorm=True, plugins=[GlobalBatchNorm()])`.

    It changes the class of the modules in place, and back. Parameters, names and hooks stay the same.
    """

    def apply(self, model: nn.Module) -> nn.Module:
        norms: list[Any] = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        for norm in norms:
            if not isinstance(norm, nn.SyncBatchNorm | SyncedBatchNorm):
                norm.class_before, norm.process_group = type(norm), None
                norm.__class__ = SyncedBatchNorm
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        for norm in [module for module in model.modules() if isinstance(module, SyncedBatchNorm)]:
            norm.__class__ = norm.class_before  # type: ignore[assignment]
        return model


class SyncedBatchNorm(_BatchNorm):
    """Batch normalization by statistics of all ranks: torch's kernels on CUDA, an equivalent implementation elsewhere.

    The input is (n, channels, ...). Every rank must hold the same number of samples; the sampler ensures it. The class
    is no subclass of torch's SyncBatchNorm, because DistributedDataParallel refuses that on a CPU.
    """

    class_before: type[_BatchNorm]
    process_group: Any
    _check_input_dim = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or dist.get_world_size(self.process_group) == 1:
            return super().forward(input)
        return self._forward_on_cuda(input) if input.is_cuda else self._forward_on_cpu(input)

    def _forward_on_cuda(self, input: Tensor) -> Tensor:
        """Let the kernel update the running statistics if it can: it needs a number as momentum, and its own type."""
        stats_type = upcast_half(input.new_empty(0)).dtype
        args, has_type = (input, self.weight, self.bias), getattr(self.running_mean, "dtype", None) == stats_type
        if self.momentum is not None and has_type:
            self.num_batches_tracked.add_(1)
            running = (self.running_mean, self.running_var, self.momentum)
            return NormalizeOnCUDA.apply(*args, *running, self.eps, self.process_group)
        mean, var = torch.zeros(2, input.shape[1], dtype=stats_type, device=input.device)
        output = NormalizeOnCUDA.apply(*args, mean, var, 1.0, self.eps, self.process_group)
        self._update_running(mean, unbiased_var=var)
        return output

    def _forward_on_cpu(self, input: Tensor) -> Tensor:
        values = upcast_half(input)
        mean, var = _global_moments(values.detach(), self.process_group)
        count = _values_per_channel(input, self.process_group)
        self._update_running(mean, unbiased_var=var * count / max(1, count - 1))
        weight = None if self.weight is None else self.weight.to(values.dtype)
        bias = None if self.bias is None else self.bias.to(values.dtype)
        return _Normalize.apply(values, weight, bias, mean, var, self.eps, self.process_group).to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, unbiased_var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor: Any = self.momentum
        if factor is None:  # the mean over all batches; a tensor, because a number would have to wait for the GPU
            factor = self.num_batches_tracked.to(self.running_mean.dtype).reciprocal()
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased_var.to(self.running_var.dtype), factor)


def _values_per_channel(input: Tensor, group: Any) -> int:
    """Return the number of values of a channel, over all ranks, for an (n, channels, ...) input."""
    return input.numel() // input.shape[1] * dist.get_world_size(group)


def _global_moments(input: Tensor, group: Any) -> tuple[Tensor, Tensor]:
    """Return the (channels,) mean and biased variance over all ranks, for an (n, channels, ...) input.

    The combination avoids cancellation (Chan, Golub and LeVeque, 1979).
    """
    # This kernel is 40 times as fast as torch.var_mean.
    own = torch.cat(torch.batch_norm_update_stats(input, None, None, 0.0))
    ranks = own.new_empty(dist.get_world_size(group), len(own))
    with communication():
        dist.all_gather(list(ranks), own, group=group)
    means, variances = ranks.view(-1, 2, input.shape[1]).unbind(1)
    mean = means.mean(0)
    return mean, (variances + (means - mean) ** 2).mean(0)


class _Normalize(torch.autograd.Function):
    """Normalization of an (n, channels, ...) input x by the moments of all ranks (Ioffe and Szegedy, 2015).

    Forward, for each channel:

        inv_std = 1 / sqrt(var + eps)
        x_hat = (x - mean) * inv_std
        y = weight * x_hat + bias

    Backward, with g = dL/dy, and means over the values of the channel on all ranks:

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
        eps: float,
        group: Any,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, var)
        ctx.eps, ctx.group = eps, group
        return torch.native_batch_norm(input, weight, bias, mean, var, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, var = ctx.saved_tensors
        grad_input, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            gradients[0], input, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.stack([grad_weight, grad_bias])
        with communication():
            dist.all_reduce(sums, group=ctx.group)
        mean_gx, mean_g = sums / _values_per_channel(input, ctx.group)
        inv_std = torch.rsqrt(var + ctx.eps)
        gamma = 1 if weight is None else weight
        slope = -mean_gx * inv_std * inv_std * gamma
        shift = -mean_g * inv_std * gamma - slope * mean
        per_channel = [1, -1] + [1] * (input.ndim - 2)
        grad_input.addcmul_(input, slope.view(per_channel)).add_(shift.view(per_channel))
        if weight is None:
            grad_weight = grad_bias = None
        return grad_input, grad_weight, grad_bias, None, None, None, None
