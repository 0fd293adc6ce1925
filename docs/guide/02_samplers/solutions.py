"""Solutions of the exercises of chapter 2."""

import math

import torch
import torch.distributed as dist
from torch import Tensor


def positions(length: int, ranks: int, rank: int, epoch: int) -> list[int]:
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    padded = math.ceil(length / ranks) * ranks
    return (order + order[: padded - length])[rank::ranks]


def exact_mean(losses: Tensor, images: int) -> float:
    is_image = dist.get_rank() + dist.get_world_size() * torch.arange(len(losses)) < images
    sums = torch.stack([losses[is_image].sum(), is_image.sum()])
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()
