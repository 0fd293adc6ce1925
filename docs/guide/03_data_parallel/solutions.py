"""Solutions of the exercises of chapter 3."""

import torch
import torch.distributed as dist
from torch import Tensor


def weighted_average(gradient: Tensor, images: int) -> Tensor:
    total = torch.tensor(float(images))
    dist.all_reduce(total)
    weighted = gradient * images / total
    dist.all_reduce(weighted)
    return weighted


def exposed_time(backward: float, buckets: int, all_reduce: float) -> float:
    link_is_free = 0.0
    for bucket in range(1, buckets + 1):
        is_full = bucket * backward / buckets
        link_is_free = max(is_full, link_is_free) + all_reduce / buckets
    return link_is_free
