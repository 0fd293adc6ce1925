"""Batch normalisation over the global batch, on CPUs too, where torch's own SyncBatchNorm refuses to work."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class GlobalBatchNorm(TorchSyncBatchNorm):
    """Lightning's layer synchronisation for any device: `Trainer(sync_batchnorm=True, plugins=[GlobalBatchNorm()])`.

    Modules change their class in place and back, so parameters, names and hooks stay what they are.
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
    """torch's kernels on a GPU; elsewhere the same mathematics from a differentiable all-reduce.

    Every rank must hold as many samples as the others, which the sampler sees to. It is no subclass of torch's
    SyncBatchNorm, since DistributedDataParallel refuses those on a CPU.
    """

    class_before: type[_BatchNorm]
    process_group: Any
    _check_input_dim = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def forward(self, input: Tensor) -> Tensor:
        if input.is_cuda or not self.training:
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        values = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
        axes = [axis for axis in range(input.ndim) if axis != 1]
        mean, var = self._global_moments(*reversed(torch.var_mean(values, axes, correction=0)))
        count = input.numel() // input.shape[1] * dist.get_world_size(self.process_group)
        self._update_running(mean.detach(), var.detach() * count / max(1, count - 1))
        scale = torch.rsqrt(var + self.eps) * (1 if self.weight is None else self.weight)
        shift = (0 if self.bias is None else self.bias) - mean * scale
        shape = [1, -1] + [1] * (input.ndim - 2)
        return torch.addcmul(shift.view(shape), values, scale.view(shape)).to(input.dtype)

    def _global_moments(self, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the ranks' moments without cancellation (Chan, Golub and LeVeque, 1979), in one all-reduce."""
        world, rank = dist.get_world_size(self.process_group), dist.get_rank(self.process_group)
        row = torch.arange(world, device=mean.device) == rank
        own = torch.stack([mean, var])
        means, variances = _AllReduceSum.apply(row.view(-1, 1, 1) * own, self.process_group).unbind(1)
        total = means.mean(0)
        return total, (variances + (means - total) ** 2).mean(0)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(var.to(self.running_var.dtype), share)


class _AllReduceSum(torch.autograd.Function):
    """A sum over ranks whose gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        tensor = tensor.contiguous().clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None
