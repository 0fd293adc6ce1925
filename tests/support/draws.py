"""Numbers of the global generators of torch, NumPy and Python."""

import random

import numpy as np
import torch

KEY = 2**40 + 2**32 + 2**31 + 7  # torch takes the lowest 32 bits as its seed, and NumPy both halves


def draws() -> list[float]:
    """Draw one number of each."""
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


def expected_draws(key: int) -> list[float]:
    """Return the first numbers that the generators of a key draw."""
    torch_draw = float(torch.rand((), generator=torch.Generator().manual_seed(key)))
    return [torch_draw, np.random.RandomState((key ^ key >> 32) % 4294967296).rand(), random.Random(key).random()]
