"""The hashes are the numbers that SplitMix64 is published with."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from onecurve.random.hashing import _hash_indices, hash_ints, integers, normal, permutation, uniform

# The first outputs of SplitMix64 for two seeds (https://prng.di.unimi.it/splitmix64.c).
FROM_0 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
FROM_1234567 = [6457827717110365317, 3203168211198807973, 9817491932198370423]
SEEDS = torch.tensor([0, 1234567])


def signed(number: int) -> int:
    """Return the int64 with these 64 bits."""
    return number - 2**64 if number >= 2**63 else number


@pytest.mark.parametrize(("seed", "expected"), [(0, FROM_0[0]), (1234567, FROM_1234567[0])])
def test_one_integer(seed: int, expected: int) -> None:
    for part in (seed, seed + 2**64, seed - 2**64, torch.tensor(seed)):
        found = hash_ints(part)
        assert (int(found), found.dtype) == (signed(expected), torch.int64)


def test_several_integers_are_hashed_in_order() -> None:
    """The hash of the first integers is mixed with the next one."""
    expected = hash_ints(5 ^ signed(FROM_0[0]))
    assert torch.equal(hash_ints(0, 5), expected)
    assert torch.equal(hash_ints(torch.tensor([0]), 5), expected[None])
    assert torch.equal(hash_ints(0, torch.tensor([[5]])), expected[None, None])
    assert int(hash_ints(0, 5)) != int(hash_ints(5, 0))


def test_no_integer_has_the_hash_zero() -> None:
    assert int(hash_ints()) == 0
    assert hash_ints(1, device="meta").device.type == "meta"


@pytest.mark.parametrize("draw", [0, 1, 2])
def test_uniform_numbers_are_the_highest_24_bits(draw: int) -> None:
    numbers = uniform(SEEDS, draw)
    assert numbers.tolist() == [(outputs[draw] >> 40) / 2**24 for outputs in (FROM_0, FROM_1234567)]
    assert numbers.dtype == torch.float32


def test_integers_are_below_their_bounds() -> None:
    """The highest 32 bits of an output, as a fraction, choose one."""
    draws, highs = (0, 2, 1), (10, 1, 2**31)
    expected = [
        [(outputs[draw] >> 32) * high // 2**32 for outputs in (FROM_0, FROM_1234567)]
        for draw, high in zip(draws, highs, strict=True)
    ]
    assert integers(SEEDS, draws, highs).tolist() == expected
    assert expected[0] == [8, 3]


def test_constants_of_draws_are_cached() -> None:
    first = integers(SEEDS, (0, 1), (2, 3))
    with patch.object(torch, "tensor", side_effect=AssertionError("a transfer would need a synchronization")):
        assert integers(SEEDS, (0, 1), (2, 3)).equal(first)


def test_normal_numbers() -> None:
    """The quantile function of the middle of each 24-bit interval."""
    numbers = normal(SEEDS, 3)
    probabilities = [[((output >> 40) + 0.5) / 2**24 for output in outputs] for outputs in (FROM_0, FROM_1234567)]
    expected = torch.special.ndtri(torch.tensor(probabilities, dtype=torch.float64)).float()
    assert torch.equal(numbers, expected)
    assert numbers.dtype == torch.float32
    assert normal(SEEDS, 0).shape == (2, 0)
    assert normal(SEEDS, 1).tolist() == numbers[:, :1].tolist()


def test_normal_numbers_differ_in_all_dimensions() -> None:
    numbers = normal(SEEDS, 4, 4, 4)
    assert len({*numbers.flatten().tolist()}) == numbers.numel()
    assert torch.equal(normal(SEEDS, 4, 2, 4), numbers[:, :, :2]), "the sizes have no part in them"


def test_hashes_of_indices_are_cached() -> None:
    device = torch.device("cpu")
    first, second = (_hash_indices(3, 1, device, torch.int64, 5, abs) for _ in range(2))
    assert first is second


@pytest.mark.parametrize("seed", [0, 1234567])
def test_permutation(seed: int) -> None:
    """The generator takes the lowest 63 bits as its seed."""
    bits = {0: FROM_0[0] - 2**63, 1234567: FROM_1234567[0]}[seed]
    expected = torch.randperm(20, generator=torch.Generator().manual_seed(bits))
    assert permutation(20, seed).tolist() == expected.tolist()
    assert sorted(permutation(20, seed, 1).tolist()) == list(range(20))
    assert permutation(20, seed, 1).tolist() != expected.tolist()
    assert permutation(0, seed).shape == (0,)


def test_numbers_are_spread_evenly() -> None:
    numbers = uniform(hash_ints(torch.arange(4000), 7), 0).numpy()
    assert 0 <= numbers.min() < 0.01
    assert 0.99 < numbers.max() < 1
    assert np.histogram(numbers, bins=4, range=(0, 1))[0].min() > 900
