"""The batch that goes from the dataset to the network, with the indices of its samples."""

from typing import NamedTuple

import torch
from torch import Tensor

from src.engine.utils.compilation import device_constant


class Batch(NamedTuple):
    """One process's part of a (micro-)batch of n samples.

    Attributes:
        image: (n, channels, height, width), uint8 until it reaches the device, then normalized floats; or the inputs of
            any other network, (n, ...).
        target: (n,) class indices or, where images are mixed, (n, classes) class probabilities; or any other targets.
        sample_index: (n,) indices that identify the samples, such as those into the dataset before its division into
            splits; -1 for padding.
        weight: (n,) weights of the samples in the loss, which is a weighted sum. On the device they are 1/n in
            training, so that the sum is the mean; in evaluation they are 1, and 0 for padding.
    """

    image: Tensor
    target: Tensor
    sample_index: Tensor
    weight: Tensor


@device_constant
def constant_weights(count: int, weight: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (count,) equal weights of samples."""
    return torch.full((count,), weight, dtype=dtype, device=device)
