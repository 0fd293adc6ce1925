"""Dropout by samples has the same masks on any hardware, and its masks are uncorrelated."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onecurve.random.dropout import (
    DropPath,
    SampleDropout,
    begin_step,
    dropouts,
    salt_by_name,
    set_keys,
    use_sample_dropout,
)
from onecurve.random.hashing import hash_ints
from tests.support.bits import check_equal_bits
from tests.support.comparison import TOLERANCE, distances
from tests.support.habits import Vectors
from tests.support.pool import Pool, RankFailed
from tests.support.runs import Record, compose, fit, fit_ranks

SAMPLES, ELEMENTS, RATE = 400, 3000, 0.3
OWN = ["~data", "~module", "~model", "~optimizer", "~scheduler", "callbacks=none", "test=false"]
OWN += ["trainer.log_every_n_steps=1", "trainer.max_epochs=1", "trainer.precision=64-true"]
OWN += ["+data._target_=tests.support.habits.VectorData"]
TWO_VIEWS = [*OWN, f"+module._target_={__name__}.TwoViews"]


def masks(layer: SampleDropout, shape: tuple[int, ...], epoch: int = 0, calls_before: int = 0) -> Tensor:
    """Return the mask of kept elements, (samples, elements)."""
    begin_step([layer])
    set_keys([layer], hash_ints(0, epoch, torch.arange(SAMPLES)))
    for _ in range(calls_before):
        layer(torch.ones(SAMPLES))
    return layer(torch.ones(SAMPLES, *shape, dtype=torch.float64)).flatten(1) > 0


def test_a_layer_keeps_its_mode_and_its_hooks() -> None:
    """A frozen part of a network is in evaluation mode before a fit, which Lightning leaves so."""
    net = nn.Sequential(nn.Dropout(RATE, inplace=True)).eval()
    net[0].register_forward_hook(lambda layer, inputs, output: output + 1)
    use_sample_dropout(net)
    assert isinstance(net[0], SampleDropout)
    assert (net[0].p, net[0].inplace) == (RATE, True)
    assert torch.equal(net(torch.ones(ELEMENTS)), torch.full((ELEMENTS,), 2.0))


def test_a_layer_that_is_compiled_by_itself_has_the_masks_of_samples() -> None:
    net = nn.Sequential(nn.Dropout(RATE))
    net[0].compile(backend="eager")
    use_sample_dropout(net)
    (layer,) = dropouts(net)
    assert torch.equal(masks(layer, (ELEMENTS,)), masks(layer, (ELEMENTS,)))


@pytest.mark.parametrize("shape", [(ELEMENTS,), (3, 100, 10), (5, 1, 24, 25)])
def test_masks_look_like_independent_draws(shape: tuple[int, ...]) -> None:
    """Masks of different samples, elements, layers, epochs and calls correlate only by chance."""
    net = nn.ModuleDict({"one": nn.Dropout(RATE), "two": nn.Dropout(RATE)})
    use_sample_dropout(net)
    one, two = (part for part in net.values() if isinstance(part, SampleDropout))
    kept = (masks(one, shape).double() - (1 - RATE)) / (RATE * (1 - RATE)) ** 0.5
    for other in (masks(two, shape), masks(one, shape, epoch=1), masks(one, shape, calls_before=1)):
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


def test_torch_draws_other_numbers_after_a_call() -> None:
    layer = SampleDropout(RATE)
    begin_step([layer])
    set_keys([layer], hash_ints(0, 0, torch.arange(SAMPLES)))
    before, _, after = torch.rand(9), layer(torch.ones(SAMPLES)), torch.rand(9)
    assert not torch.equal(before, after)


class Twice(nn.Module):
    """Calls one dropout layer at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.drop(self.second(self.drop(self.first(x)).relu()).relu()))


class TwoViews(Vectors):
    """R-Drop (Wu et al., 2021): two passes of a batch with other dropout. The second may be computed again."""

    def __init__(self, recomputes: bool = True) -> None:
        super().__init__()
        self.net, self.drop, self.recomputes = Twice(), nn.Dropout(0.5), recomputes  # type: ignore[assignment]
        self.teacher = Twice().requires_grad_(False)  # type: ignore[assignment]

    def mean(self, x: Tensor, y: Tensor, batch_idx: int) -> Tensor:
        one, other = self.net(x), checkpoint(self.net, x, use_reentrant=False) if self.recomputes else self.net(x)
        apart = (one - other).square().mean()
        self.log("apart", apart, sync_dist=True)
        return F.cross_entropy(one, y) + F.cross_entropy(other, y) + apart

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Measure by dropout, too, how sure the network is."""
        self.drop.train()
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(self.drop(x)), y), sync_dist=True)

    def on_train_end(self) -> None:
        """Draw as in torch, also for as many rows as a batch has."""
        assert len({float(self.drop(torch.ones(32, 9)).sum()) for _ in range(9)}) > 2


@pytest.fixture(scope="module")
def two_views(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Record]:
    """Return a function that trains two views of each batch on one process."""
    return functools.cache(lambda *words: fit(compose(tmp_path_factory.mktemp("one"), *TWO_VIEWS, *words)))


def test_copies_of_a_layer_have_other_masks() -> None:
    """As those of a teacher, which a hook copies when the layers have their salts, also without the original."""
    net = nn.Sequential(nn.Dropout(RATE), nn.Dropout(RATE))
    use_sample_dropout(net)
    net.extend([copy.deepcopy(net), copy.deepcopy(net)])
    layers = dropouts(net)
    salts = [layer.salt for layer in layers]
    assert len(set(salts)) == 2
    net[0] = nn.Identity()  # as a block of another stage of a pipeline
    salt_by_name(net)
    now = [layer.salt for layer in layers]
    assert now[:2] == salts[:2]
    assert len(set(now)) == len(now) == 6
    use_sample_dropout(net)  # as a second fit does
    assert [layer.salt for layer in layers] == now


def test_a_layer_that_is_called_again_has_another_mask(two_views: Callable[..., Record]) -> None:
    assert two_views().metrics["apart"] > 1e-3
    assert max(distances(two_views(), two_views("+module.recomputes=false"))) < TOLERANCE


@pytest.mark.parametrize("strategy", ["auto", "ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_calls_have_the_masks_of_one_process(
    strategy: str, two_views: Callable[..., Record], pool: Pool, folder: Path
) -> None:
    devices = 1 if strategy == "auto" else 2
    words = [*TWO_VIEWS, f"strategy={strategy}", f"trainer.devices={devices}", "trainer.accumulate_grad_batches=2"]
    for record in fit_ranks(compose(folder, *words), pool):
        assert max(distances(record, two_views())) < TOLERANCE
        assert record.metrics["val_loss"] == pytest.approx(two_views().metrics["val_loss"], rel=TOLERANCE)


def test_calls_have_the_bits_of_one_process(two_views: Callable[..., Record], pool: Pool, folder: Path) -> None:
    words = [*TWO_VIEWS, "bit_exact=true", "strategy=ddp", "trainer.devices=2"]
    check_equal_bits(fit_ranks(compose(folder, *words), pool), two_views("bit_exact=true"))


class InTwoStages(Vectors):
    """Has one call of the dropout layer in each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.teacher = Twice(), nn.Identity()  # type: ignore[assignment]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])


def test_a_pipeline_refuses_a_layer_of_two_stages(pool: Pool, folder: Path) -> None:
    words = [*OWN, f"+module._target_={__name__}.InTwoStages", "strategy=pipeline", "strategy.split=[second]"]
    words += ["trainer.devices=2"]
    with pytest.raises(RankFailed, match="two stages call the dropout layer drop"):
        fit_ranks(compose(folder, *words), pool)


class CalledBefore(InTwoStages):
    """Calls the first layer of the network also by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Dropout(0.3), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(self.net[0](batch[0])), batch)

    def on_train_batch_end(self, *_: Any) -> None:
        """Have no average of the weights, of which a rank holds some."""


def test_a_layer_of_a_pipeline_counts_the_calls_before_the_network(pool: Pool, folder: Path) -> None:
    words = [*OWN, f"+module._target_={__name__}.CalledBefore"]
    expected = fit(compose(folder / "one", *words))
    for record in fit_ranks(compose(folder / "two", *words, "strategy=pipeline", "trainer.devices=2"), pool):
        assert max(distances(record, expected)) < TOLERANCE
