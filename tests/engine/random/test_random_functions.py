"""Random functions give a sample the same numbers in any part of the batch, or are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal
from torch.utils.checkpoint import checkpoint

from onecurve.errors import UserError
from onecurve.random.dropout import dropouts, set_keys, use_sample_dropout
from onecurve.random.hashing import hash_ints
from onecurve.random.random_functions import intercept, release, sample_random

SAMPLES = 12
IMAGES = torch.randn(SAMPLES, 4, 6, 6, dtype=torch.float64)
TOKENS = torch.randn(SAMPLES, 5, 8, dtype=torch.float64)
ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).double()
ENCODER = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).double()
LSTM = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True).double()


def draw(function: Callable[[Tensor], Tensor], values: Tensor, rows: Tensor) -> Tensor:
    """Call a function on some samples, in a batch of a run."""
    intercept()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sample_random.begin(lambda: hash_ints(0, 0, rows), torch.device("cpu"), is_divided=len(rows) < SAMPLES)
        try:
            result = function(values[rows]).detach()
            sample_random.check()
        finally:
            sample_random.end()
    return result


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda x: F.dropout(x, 0.3), IMAGES),
        (lambda x: F.dropout(x.clone(), 0.3, inplace=True), IMAGES),
        (lambda x: F.dropout(x, 1.0), IMAGES),
        (nn.Dropout2d(0.3), IMAGES),
        (lambda x: x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.6), IMAGES),
        (lambda x: x + torch.randn_like(x), IMAGES),
        (lambda x: x + torch.rand_like(x), IMAGES),
        (lambda x: Normal(x, 2.0).rsample(), IMAGES),
        (lambda x: ATTENTION(x, x, x)[0], TOKENS),
        (lambda x: ATTENTION(x, x, x, need_weights=False)[0], TOKENS),
        (ENCODER, TOKENS),
    ],
    ids="dropout in_place all dropout2d drop_path noise uniform distribution weights sdpa encoder".split(),
)
def test_a_sample_has_its_numbers_in_any_part_of_the_batch(
    function: Callable[[Tensor], Tensor], values: Tensor
) -> None:
    full = draw(function, values, torch.arange(SAMPLES))
    for rows in (torch.arange(start, SAMPLES, 3) for start in range(3)):
        assert torch.allclose(draw(function, values, rows), full[rows], rtol=1e-12)
    assert not torch.allclose(full, values, rtol=1e-12)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.rand(5, 7) > 0.4}, {"scale": 0.3}])
def test_attention_without_dropped_weights_is_that_of_torch(options: dict[str, Any]) -> None:
    """Its queries have twice as many heads as its keys."""
    key, value = (torch.randn(SAMPLES, 2, 7, size, dtype=torch.float64) for size in (6, 3))

    def attend(query: Tensor, rate: float = 0.0) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=rate, enable_gqa=True, **options)

    query = torch.randn(SAMPLES, 4, 5, 6, dtype=torch.float64)
    assert torch.allclose(draw(lambda x: attend(x, 1e-12), query, torch.arange(SAMPLES)), attend(query))


def attend(tokens: Tensor) -> Tensor:
    """Attend to the tokens that are not padding, which is nan."""
    is_padding = tokens[..., 0].isnan()
    tokens = tokens.nan_to_num()
    return ATTENTION(tokens, tokens, tokens, key_padding_mask=is_padding, need_weights=False)[0]


@pytest.mark.parametrize(
    ("function", "padding"),
    [
        (lambda x: F.dropout(x, 0.3), (0, 0, 0, 3)),
        (lambda x: F.dropout(x, 0.3), (0, 3)),  # as of channels before a sequence
        (nn.Dropout(0.3), (0, 3)),
        (lambda x: x + torch.randn_like(x), (0, 3)),
        (attend, (0, 0, 0, 3)),
    ],
    ids="tokens channels layer noise attention".split(),
)
def test_a_sample_has_its_numbers_at_any_length_to_which_its_batch_is_padded(
    function: Any, padding: tuple[int, ...]
) -> None:
    def call(values: Tensor) -> Tensor:
        if isinstance(function, nn.Dropout):
            net = nn.Sequential(function)
            use_sample_dropout(net)
            set_keys(dropouts(net), hash_ints(0, 0, torch.arange(SAMPLES)))
            return net(values)
        return function(values)

    padded = F.pad(TOKENS, padding, value=torch.nan)
    expected, found = (draw(call, values, torch.arange(SAMPLES)) for values in (TOKENS, padded))
    assert torch.allclose(found[:, : expected.shape[1], : expected.shape[2]], expected, rtol=1e-12)


@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_drops_as_often_as_torch(rate: float) -> None:
    """The mean of the outputs is that of the inputs, and calls have different masks."""
    ones = torch.ones(SAMPLES, 4, 20, 20)
    query, value = torch.zeros(SAMPLES, 4, 20, 20), torch.ones(SAMPLES, 4, 20, 1)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.dropout(x, rate),
        lambda x: F.dropout2d(x.transpose(1, 2).flatten(2)[..., None], rate),
        lambda x: x.bernoulli_(1 - rate) / (1 - rate),
        lambda x: F.scaled_dot_product_attention(query, query, value, dropout_p=rate),
    ]
    for function in functions:
        dropped = draw(function, ones, torch.arange(SAMPLES))
        assert float(dropped.mean()) == pytest.approx(1, abs=0.15)
        assert float(dropped.std()) > 0
    twice = draw(lambda x: torch.stack([F.dropout(x, rate), F.dropout(x, rate)]), ones, torch.arange(SAMPLES))
    one, other = ((twice > 0).double() - (1 - rate)) / (rate * (1 - rate)) ** 0.5
    assert abs(float((one * other).mean())) < 5 / one.numel() ** 0.5


def dropped_together(dropped: Tensor) -> int:
    """Return by how many dimensions the values are given that are dropped as one."""
    spreads = [float(dropped.flatten(dim).std(-1).max()) for dim in range(1, dropped.ndim)]
    return next((dim for dim, spread in enumerate(spreads, 1) if spread == 0), dropped.ndim)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("1d", (3,)), ("1d", (3, 4)), ("2d", (3, 4, 5)), ("3d", (3, 4, 5)), ("3d", (3, 4, 5, 2))],
)
def test_drops_the_channels_that_torch_drops(name: str, shape: tuple[int, ...]) -> None:
    """Of a tensor that seems to have no dimension of samples they are its rows."""
    function, ones = getattr(F, f"dropout{name}"), torch.ones(SAMPLES, *shape)
    assert dropped_together(draw(function, ones, torch.arange(SAMPLES))) == dropped_together(function(ones))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: F.dropout(x.flatten(0, 1)), r"F.dropout on a tensor of shape \[20, 8\]"),
        (lambda x: F.dropout(x.transpose(0, 1)), r"F.dropout on a tensor of shape \[5, 4, 8\]"),
        (lambda x: x[torch.randperm(len(x))], "would depend .*: use nn.Dropout, F.dropout, .*bernoulli_, .*rsample on"),
        (lambda x: F.dropout(x + torch.rand(x.shape)), "draws numbers that would depend"),
        (lambda x: x + torch.rand_like(x[0]), r"torch.rand_like on a tensor of shape \[5, 8\]"),
        (lambda x: x + Normal(0.0, 1.0).rsample((5, 8)), r"normal distribution on a tensor of shape \[5, 8\]"),
        (lambda x: LSTM(x)[0], "draws numbers that would depend"),
        (
            torch.compile(lambda x: F.dropout(x.sin(), 0.3), backend="aot_eager"),
            "in a compiled network draws",
        ),
    ],
    ids=["flattened", "tokens first", "permutation", "before dropout", "one row", "sizes", "lstm", "compiled"],
)
def test_refuses_numbers_that_depend_on_the_part(function: Callable[[Tensor], Tensor], name: str) -> None:
    draw(function, TOKENS, torch.arange(SAMPLES))
    with pytest.raises(UserError, match=name):
        draw(function, TOKENS, torch.arange(0, SAMPLES, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda weight: torch.randn_like(weight),
        lambda weight: F.dropout(weight, 0.3),
        lambda weight: Normal(weight, weight.exp()).rsample(),
    ],
    ids="noise dropout distribution".split(),
)
def test_rows_of_a_parameter_are_no_samples(function: Callable[[Tensor], Tensor]) -> None:
    """Each process would have other noise on the weights of a Bayesian layer, if it has as many rows as samples."""
    weight = nn.Parameter(torch.ones(SAMPLES, 4))
    torch.manual_seed(0)
    expected = function(weight)
    assert torch.equal(draw(lambda x: function(weight), IMAGES, torch.arange(SAMPLES)), expected)
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(UserError, match=r" on a parameter of shape \[4, 4\] draws numbers that would depend"):
        draw(lambda x: function(weight), IMAGES, torch.arange(4))


def test_inputs_that_are_learned_have_a_row_for_each_sample() -> None:
    token = nn.Parameter(torch.ones(1, 4))
    full, part = (
        draw(lambda x: F.dropout(token.expand(len(x), -1), 0.5), IMAGES, torch.arange(count)) for count in (SAMPLES, 4)
    )
    assert torch.equal(full[:4], part)


def test_outside_of_a_batch_functions_are_those_of_torch() -> None:
    intercept()
    torch.manual_seed(0)
    dropped = F.dropout(TOKENS, 0.3)
    torch.manual_seed(0)
    assert torch.equal(dropped, torch.dropout(TOKENS, 0.3, True))
    release()
    assert not hasattr(F.dropout, "__wrapped__")


def test_a_block_that_is_computed_again_has_the_same_numbers() -> None:
    weight, seen = torch.ones(8, dtype=torch.float64, requires_grad=True), []

    def block(x: Tensor) -> Tensor:
        seen.append(F.dropout(x * weight, 0.5))
        return seen[-1].sin()

    def train(x: Tensor) -> Tensor:
        noise: Any = checkpoint(block, x, use_reentrant=False)
        F.dropout(noise).sum().backward()
        return noise

    draw(train, TOKENS, torch.arange(SAMPLES))
    first, again = seen
    assert torch.equal(first, again)
    assert 0 < (first == 0).sum() < first.numel()


@pytest.mark.parametrize(
    "function",
    [nn.Dropout(0.3), lambda x: F.dropout(x, 0.3), torch.randn_like],
    ids="layer function noise".split(),
)
def test_members_of_an_ensemble_draw_other_numbers(function: Any) -> None:
    """torch.vmap computes them on the same samples; where samples are divided it has no numbers by sample."""

    def members(values: Tensor, **options: Any) -> Tensor:
        net = nn.Sequential(function) if isinstance(function, nn.Module) else function
        if isinstance(net, nn.Module):
            use_sample_dropout(net)
            set_keys(dropouts(net), hash_ints(0, 0, torch.arange(len(values))))
        return torch.vmap(lambda scale: net(values * scale), **options)(torch.ones(2, 1, 1, dtype=torch.float64))

    first, second = draw(lambda x: members(x, randomness="different"), TOKENS, torch.arange(SAMPLES))
    assert not torch.equal(first, second)
    with pytest.raises(RuntimeError, match="randomness error"):
        draw(members, TOKENS, torch.arange(SAMPLES))
    with pytest.raises(UserError, match="draws numbers that would depend"):
        draw(lambda x: members(x, randomness="different"), TOKENS, torch.arange(6))


def test_noise_has_the_options_of_torch() -> None:
    """A generator of the user's gives the numbers, and complex noise has an imaginary part."""

    def noise(**options: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: torch.view_as_real(torch.randn_like(torch.complex(x, x), **options))

    first, second = (draw(noise(), TOKENS, torch.arange(SAMPLES)).std((0, 1, 2)) for _ in range(2))
    assert first.tolist() == second.tolist() == pytest.approx([0.5**0.5] * 2, rel=0.2)
    seed = torch.Generator().manual_seed
    assert torch.equal(
        draw(lambda x: torch.randn_like(x, generator=seed(1)), TOKENS, torch.arange(SAMPLES)),
        torch.randn_like(TOKENS, generator=seed(1)),
    )

    def check(x: Tensor) -> Tensor:
        assert torch.randn_like(x, requires_grad=True).requires_grad
        with pytest.raises(RuntimeError, match="expects p to be in"):
            x.bernoulli_(1.5)
        return x

    draw(check, TOKENS, torch.arange(SAMPLES))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_noise_has_the_distribution_of_torch(dtype: torch.dtype) -> None:
    """In half precision, too, a uniform number is below 1."""
    functions: list[tuple[Callable[[Tensor], Tensor], float, float]] = [
        (torch.rand_like, 1 / 2, 1 / 12),
        (lambda x: Normal(3 + 0 * x, 2.0).rsample(), 3, 4),
        (torch.randn_like, 0, 1),
    ]
    for function, mean, variance in functions:
        numbers = draw(function, torch.zeros(SAMPLES, 2000, dtype=dtype), torch.arange(SAMPLES))
        assert numbers.dtype == dtype
        assert [float(numbers.double().mean()), float(numbers.double().var())] == pytest.approx(
            [mean, variance], 0.1, 0.1
        )
    uniform = draw(torch.rand_like, torch.zeros(SAMPLES, 2000, dtype=dtype), torch.arange(SAMPLES))
    assert uniform.min() >= 0
    assert uniform.max() < 1


def test_several_draws_of_a_distribution_have_a_row_for_each_sample() -> None:
    """The first dimension is that of the draws, so it is as for any function with other rows."""
    draws = draw(lambda x: Normal(x[0], 2.0).rsample((len(x),)), TOKENS, torch.arange(SAMPLES))
    assert draws.shape == TOKENS.shape
    assert len(draws.unique()) == draws.numel()


def test_a_layer_drops_in_place_as_in_torch() -> None:
    """So a branch that is added to its own input drops both."""
    net = nn.Sequential(nn.Dropout(0.3, inplace=True))
    use_sample_dropout(net)
    set_keys(dropouts(net), hash_ints(0, 0, torch.arange(SAMPLES)))
    values = torch.ones(SAMPLES, 8)
    dropped = net(values)
    assert dropped is values
    assert values.unique().tolist() == pytest.approx([0, 1 / 0.7])
