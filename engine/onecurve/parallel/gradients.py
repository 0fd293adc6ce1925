"""Averaging of gradients over the replicas of a pipeline; clipping of a pipeline, and of any strategy with `bit_exact`.

Otherwise DDP and FSDP average by themselves, and Lightning clips.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from onecurve.network.norm import order_free_norm
from onecurve.network.tensors import copy_from_vector, to_full_tensor, to_vector
from onecurve.observe.step_times import timed_communication


def weights_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [weight for optimizer in optimizers for group in optimizer.param_groups for weight in group["params"]]


@timed_communication()
def average_over(group: dist.ProcessGroup, gradients: list[Tensor]) -> None:
    """Replace the gradients with their means over the ranks of `group`, which hold replicas, in one all-reduce."""
    if dist.get_world_size(group) == 1:
        return
    vector = to_vector(gradients).div_(dist.get_world_size(group))
    dist.all_reduce(vector, group=group)
    copy_from_vector(vector, gradients)


def clip_by_norm_over(
    group: dist.ProcessGroup | None, optimizer: Optimizer, clip_val: float, is_bit_exact: bool = False
) -> None:
    """Clip the gradients to a norm over all ranks of `group`, which hold different elements of them."""
    parameters = weights_of([optimizer])
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if is_bit_exact:  # under every strategy (`BitExactness` of `onecurve/run/bit_exact.py`)
        norm = order_free_norm(gradients, parameters[0].device, group).to(parameters[0].dtype.to_real())
    else:
        squared_norm = to_full_tensor(nn.utils.get_total_norm(gradients)) ** 2
        dist.all_reduce(squared_norm, group=group)
        norm = squared_norm.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, clip_val, norm)
