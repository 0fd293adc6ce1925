"""Counter-based random numbers: pure functions of integers, without a generator and without state to save.

Every number is a hash of integers (seed, epoch, sample index, draw). Neither the number of processes, nor the order of
the samples, nor a restart changes it. The same integers give the same bits on a CPU and on a GPU. The mixing
function is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014), in two's-complement 64-bit arithmetic.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from onecurve.network.compilation import constant, device_constant

# int64 holds the constants 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9 and 0x94D049BB133111EB as negative numbers.
_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def _wrap(x: Any) -> Any:
    """Wrap a Python integer around at 64 bits; int64 tensors wrap around by themselves."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63) if isinstance(x, int) else x


def _shift_right(x: Any, bits: int) -> Any:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift: int64's own shift copies the sign


def _mix(x: Any) -> Any:
    x = _wrap((x ^ _shift_right(x, 30)) * _MIX1)
    x = _wrap((x ^ _shift_right(x, 27)) * _MIX2)
    return x ^ _shift_right(x, 31)


def hash_ints(*parts: int | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """Hash broadcastable integers, in order, to 64 well-mixed bits (int64)."""
    state: Any = 0  # stays a Python integer as long as possible, because each tensor operation has overhead
    for part in parts:
        state = _mix(_wrap((_wrap(part) ^ state) + _GOLDEN))
    return torch.tensor(state, device=device) if isinstance(state, int) else state


def uniform(keys: Tensor, draw: int) -> Tensor:
    """Return float32 numbers in [0, 1), in the shape of `keys`; `draw` distinguishes the uses of one key."""
    return _shift_right(_mix(keys + _wrap((draw + 1) * _GOLDEN)), 40).float() * 2.0**-24


def integers(keys: Tensor, draws: tuple[int, ...], highs: tuple[int, ...]) -> Tensor:
    """Return int64 numbers in [0, high), as (draws, n): one for each draw with its `high`, and each of (n,) keys."""
    offsets = constant(tuple(_wrap((draw + 1) * _GOLDEN) for draw in draws), torch.int64, keys.device)
    bounds = constant(highs, torch.int64, keys.device)
    return (_shift_right(_mix(keys + offsets[:, None]), 32) * bounds[:, None]) >> 32


def hash_elements(
    shape: Sequence[int], device: torch.device, dtype: torch.dtype, golden: int, mix: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return a hash of the indices of each element of a tensor of this shape, zero for the first.

    The sizes have no part in it, because ranks may pad their samples to different lengths.
    """
    hashes = torch.zeros((), dtype=dtype, device=device)
    for number, size in enumerate(shape, 1):
        hashes = hashes[..., None] + _hash_indices(size, len(shape) - number, device, dtype, golden, mix)
    return hashes


@device_constant
def _hash_indices(
    size: int, times: int, device: torch.device, dtype: torch.dtype, golden: int, mix: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the multiples of `golden`, (size,), mixed as often as distinguishes the dimensions of a tensor."""
    hashes = torch.arange(size, dtype=dtype, device=device) * golden
    for _ in range(times):
        hashes = mix(hashes)
    return hashes


def normal(keys: Tensor, *shape: int) -> Tensor:
    """Return (n, *shape) float32 numbers from the standard normal distribution, for each of (n,) keys."""
    bits = _bits_of_elements(keys, shape, 24)
    place = "cpu" if keys.device.type == "mps" else keys.device  # Apple's GPUs have no float64
    probabilities = (bits.to(place).double() + 0.5) * 2.0**-24
    return torch.special.ndtri(probabilities).float().to(keys.device)


def uniform_rows(keys: Tensor, *shape: int, bits: int = 24) -> Tensor:
    """Return (n, *shape) float32 numbers in [0, 1), multiples of 2**-bits, for each of (n,) keys."""
    return _bits_of_elements(keys, shape, bits).float() * 2.0**-bits


def _bits_of_elements(keys: Tensor, shape: Sequence[int], bits: int) -> Tensor:
    elements = hash_elements(shape, keys.device, torch.int64, _GOLDEN, _mix) + _GOLDEN
    return _shift_right(_mix(keys.view(-1, *[1] * len(shape)) + elements), 64 - bits)


def permutation(count: int, *parts: int) -> Tensor:
    """Return the (count,) permutation of range(count) that the integers `parts` determine, on the CPU."""
    seed = int(hash_ints(*parts)) & ((1 << 63) - 1)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
