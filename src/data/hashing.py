"""Random numbers as a pure function of what they are for: no generator, no state to save or to share.

Every number is a hash of integers (seed, epoch, sample index, draw), so neither the number of processes,
nor the order of the samples, nor a restart can change it; the same integers give the same bits on a CPU
and on a GPU. The mixing function is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014), in two's-complement 64-bit arithmetic.
"""

from typing import Any

import torch
from torch import Tensor


def _signed(bits: int) -> int:
    """The number that torch.int64 holds for the low 64 bits."""
    return (bits + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _wrap(x: Any) -> Any:
    """Tensors wrap around by themselves, Python's integers do not."""
    return _signed(x) if isinstance(x, int) else x


def _shift_right(x: Any, bits: int) -> Any:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical: int64's own shift copies the sign


def _mix(x: Any) -> Any:
    x = _wrap((x ^ _shift_right(x, 30)) * _MIX1)
    x = _wrap((x ^ _shift_right(x, 27)) * _MIX2)
    return x ^ _shift_right(x, 31)


def hash_ints(*parts: int | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Hash broadcastable integers, in order, to 64 well-mixed bits (int64)."""
    state: Any = 0  # an integer as long as it can be: each operation on a tensor costs
    for part in parts:
        state = _mix(_wrap((_wrap(part) ^ state) + _GOLDEN))
    return torch.tensor(state, device=device) if isinstance(state, int) else state


def _draw(keys: Tensor, draw: int | Tensor) -> Tensor:
    return _mix(keys + _wrap((draw + 1) * _GOLDEN))


def uniform(keys: Tensor, draw: int) -> Tensor:
    """Float32 numbers in [0, 1), one for each key; `draw` tells the uses of one key apart."""
    return _shift_right(_draw(keys, draw), 40).float() * 2.0**-24


def integers(keys: Tensor, draw: int | Tensor, high: int) -> Tensor:
    """Int64 numbers in [0, high), one for each key; or for each of several draws, which broadcast with the keys."""
    return (_shift_right(_draw(keys, draw), 32) * high) >> 32


def normal(keys: Tensor, count: int) -> Tensor:
    """(n, count) float32 numbers of the standard normal distribution, `count` for each of n keys."""
    places = torch.arange(1, count + 1, device=keys.device) * _GOLDEN
    shares = (_shift_right(_mix(keys[:, None] + places), 40).double() + 0.5) * 2.0**-24
    return torch.special.ndtri(shares).float()


def permutation(count: int, *parts: int) -> Tensor:
    """A permutation of range(count), fixed by `parts`."""
    seed = int(hash_ints(*parts)) & ((1 << 63) - 1)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
