"""Dropout by samples has the same masks on any hardware, and its masks are uncorrelated."""

import pytest
import torch
from torch import Tensor, nn

from onecurve.random.dropout import DropPath, SampleDropout, set_keys, use_sample_dropout
from onecurve.random.hashing import hash_ints

SAMPLES, ELEMENTS, RATE = 400, 3000, 0.3


def masks(layer: SampleDropout, shape: tuple[int, ...], epoch: int = 0) -> Tensor:
    """Return the mask of kept elements, (samples, elements)."""
    set_keys([layer], hash_ints(0, epoch, torch.arange(SAMPLES)))
    return layer(torch.ones(SAMPLES, *shape, dtype=torch.float64)).flatten(1) > 0


@pytest.mark.parametrize("shape", [(ELEMENTS,), (3, 100, 10), (5, 1, 24, 25)])
def test_masks_look_like_independent_draws(shape: tuple[int, ...]) -> None:
    """Masks of different samples, elements, layers and epochs correlate only by chance."""
    net = nn.ModuleDict({"one": nn.Dropout(RATE), "two": nn.Dropout(RATE)})
    use_sample_dropout(net)
    one, two = (part for part in net.values() if isinstance(part, SampleDropout))
    kept = (masks(one, shape).double() - (1 - RATE)) / (RATE * (1 - RATE)) ** 0.5
    for other in (masks(two, shape), masks(one, shape, epoch=1)):
        other = (other.double() - (1 - RATE)) / (RATE * (1 - RATE)) ** 0.5
        assert abs(float((kept * other).mean())) < 5 / (SAMPLES * ELEMENTS) ** 0.5
    assert abs(float(kept.mean())) < 5 / (SAMPLES * ELEMENTS) ** 0.5
    for table, length in ((kept, ELEMENTS), (kept.T, SAMPLES)):
        correlation = table @ table.T / length
        correlation.fill_diagonal_(0)
        assert float(correlation.abs().max()) < 6.5 / length**0.5
        assert float(correlation.square().mean()) == pytest.approx(1 / length, rel=0.05)


def test_keeps_the_mean_and_does_not_depend_on_the_batch() -> None:
    layer = SampleDropout(RATE)
    keys, image = hash_ints(0, 0, torch.arange(SAMPLES)), torch.rand(SAMPLES, 4, 5, 6)
    set_keys([layer], keys)
    expected = layer(image)
    assert float(expected.mean()) == pytest.approx(float(image.mean()), rel=0.02)
    set_keys([layer], keys[7:9])
    assert torch.equal(layer(image[7:9]), expected[7:9])
    assert torch.equal(layer.eval()(image), image)


def test_drop_path_drops_a_sample_entirely() -> None:
    layer = DropPath(RATE)
    set_keys([layer], hash_ints(0, 0, torch.arange(SAMPLES)))
    kept = layer(torch.ones(SAMPLES, 3, 2)).flatten(1)
    assert kept.unique().tolist() == [0.0, pytest.approx(1 / (1 - RATE))]
    assert all(len(set(row.tolist())) == 1 for row in kept)
    assert float((kept[:, 0] > 0).float().mean()) == pytest.approx(1 - RATE, abs=0.08)


def test_layers_hashed_together_have_the_masks_of_each() -> None:
    layers = [SampleDropout(RATE), DropPath(RATE), DropPath(1.0), DropPath(0.6), SampleDropout(0.0), SampleDropout(1.0)]
    keys, ones = hash_ints(0, 0, torch.arange(SAMPLES)), torch.ones(SAMPLES, 3)
    for salt, layer in enumerate(layers):
        layer.salt = salt
    set_keys(layers, keys)
    together = [layer(ones) for layer in layers]
    for layer, expected in zip(layers, together, strict=True):
        set_keys([layer], keys)
        assert torch.equal(layer(ones), expected)
    assert torch.equal(together[4], ones)
    assert torch.equal(together[5], 0 * ones)
    kept = (together[3][:24, 0] > 0).nonzero().flatten().tolist()
    assert kept == [1, 4, 6, 17, 19, 20], "fixed, since other masks would change every experiment"


def test_layers_without_a_row_for_each_sample_behave_as_in_torch() -> None:
    shared = nn.Dropout(RATE)
    net = nn.Sequential(shared, nn.Linear(3, 3), shared)
    use_sample_dropout(net)
    assert isinstance(net[0], SampleDropout)
    assert isinstance(net[2], SampleDropout)
    assert net[0].salt != net[2].salt
    set_keys([net[0]], hash_ints(0, 0, torch.arange(4)))
    assert net[0](torch.ones(9, 4, 8)).shape == (9, 4, 8)
