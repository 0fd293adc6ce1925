"""Gradients clipped by the norm over all ranks that hold a part of the network."""

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


def clip_by_norm_over(group: dist.ProcessGroup, optimizer: Optimizer, clip_val: float) -> None:
    """Scale the gradients such that their norm, over the parameters of every rank of `group`, is at most `clip_val`."""
    weights = [weight for part in optimizer.param_groups for weight in part["params"] if weight.grad is not None]
    square = nn.utils.get_total_norm([weight.grad for weight in weights]) ** 2
    dist.all_reduce(square, group=group)
    nn.utils.clip_grads_with_norm_(weights, clip_val, square.sqrt())
