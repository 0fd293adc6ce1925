"""Solutions of the exercises of chapter 4."""

import torch
from torch import Tensor


def weighted_loss(losses: list[Tensor], images: int, devices: int) -> Tensor:
    parts = torch.arange(images).chunk(devices)
    return torch.stack([loss * len(part) / images for loss, part in zip(losses, parts, strict=True)]).sum()


def forward_time(launch: float, compute: float, devices: int) -> float:
    return (devices - 1) * launch + max(launch, compute)
