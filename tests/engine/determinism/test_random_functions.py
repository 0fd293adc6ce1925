"""Random functions give a sample the same numbers in any part of the batch, or are refused."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from src.engine.determinism.hashing import hash_ints
from src.engine.determinism.random_functions import RandomNumbers, sample_random
from src.engine.utils.errors import UserError

SAMPLES = 12
IMAGES = torch.randn(SAMPLES, 4, 6, 6, dtype=torch.float64)
TOKENS = torch.randn(SAMPLES, 5, 8, dtype=torch.float64)
ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True).double()
ENCODER = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True).double()
LSTM = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True).double()


@pytest.fixture(autouse=True)
def _generators() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


def draw(function: Callable[[Tensor], Tensor], values: Tensor, rows: Tensor) -> Tensor:
    """Call a function on some samples, in the mode."""
    sample_random.begin(lambda: hash_ints(0, 0, rows), torch.device("cpu"))
    sample_random.is_divided, sample_random.checks_all = len(rows) < SAMPLES, True
    torch.manual_seed(0)
    with sample_random.active():
        return function(values[rows]).detach()


@pytest.mark.parametrize(
    ("function", "values"),
    [
        (lambda x: F.dropout(x, 0.3), IMAGES),
        (lambda x: F.dropout(x.clone(), 0.3, inplace=True), IMAGES),
        (lambda x: F.dropout(x, 1.0), IMAGES),
        (nn.Dropout2d(0.3), IMAGES),
        (nn.RReLU(inplace=True), IMAGES),
        (nn.AlphaDropout(0.3), IMAGES),
        (nn.RReLU(), IMAGES),
        (lambda x: x * x.new_empty(len(x), 1, 1, 1).bernoulli_(0.6), IMAGES),
        (lambda x: x + torch.randn_like(x), IMAGES),
        (lambda x: torch.rand(len(x), 2), IMAGES),
        (lambda x: torch.randint(0, 1000, (len(x),)), IMAGES),
        (lambda x: torch.normal(0.0, 1.0, size=(len(x), 3)), IMAGES),
        (lambda x: F.gumbel_softmax(x[:, :, 0, 0]), IMAGES),
        (lambda x: ATTENTION(x, x, x)[0], TOKENS),
        (lambda x: ATTENTION(x, x, x, need_weights=False)[0], TOKENS),
        (ENCODER, TOKENS),
    ],
    ids="dropout in_place all dropout2d rrelu_in_place alpha rrelu drop_path noise size integers normal gumbel "
    "weights sdpa encoder".split(),
)
def test_a_sample_has_its_numbers_in_any_part_of_the_batch(
    function: Callable[[Tensor], Tensor], values: Tensor
) -> None:
    full = draw(function, values, torch.arange(SAMPLES))
    for rows in (torch.arange(start, SAMPLES, 3) for start in range(3)):
        assert torch.allclose(draw(function, values, rows), full[rows], rtol=1e-12)


@pytest.mark.parametrize("function", [torch.randn_like, lambda x: x.clone().normal_(), nn.AlphaDropout(0.3)])
def test_numbers_do_not_depend_on_the_memory_format(function: Callable[[Tensor], Tensor]) -> None:
    every, channels_last = torch.arange(SAMPLES), IMAGES.to(memory_format=torch.channels_last)
    assert torch.equal(draw(function, IMAGES, every), draw(function, channels_last, every))


def test_numbers_without_rows_are_those_of_all() -> None:
    full = draw(lambda x: x * torch.rand(()), IMAGES, torch.arange(SAMPLES))
    assert torch.equal(draw(lambda x: x * torch.rand(()), IMAGES, torch.arange(4)), full[:4])
    assert not torch.equal(full, draw(lambda x: x * torch.rand(()) * torch.rand(()), IMAGES, torch.arange(SAMPLES)))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: F.dropout(x.flatten(0, 1)), r"dropout with shape \[20, 8\]"),
        (lambda x: F.dropout(x.transpose(0, 1)), r"dropout with shape \[5, 4, 8\]"),
        (lambda x: x[torch.randperm(len(x))], "randperm"),
        (lambda x: LSTM(x)[0], "lstm draws"),
    ],
    ids=["flattened", "tokens first", "permutation", "lstm"],
)
def test_refuses_numbers_that_depend_on_the_part(function: Callable[[Tensor], Tensor], name: str) -> None:
    draw(function, TOKENS, torch.arange(SAMPLES))
    with pytest.raises(UserError, match=name):
        draw(function, TOKENS, torch.arange(0, SAMPLES, 3))


def test_refuses_a_size_that_could_be_of_one_sample() -> None:
    draw(lambda x: x * torch.rand(1), TOKENS, torch.arange(SAMPLES))
    with pytest.raises(UserError, match="rand with shape"):
        draw(lambda x: x * torch.rand(1), TOKENS, torch.arange(1))


def test_refuses_a_step_that_draws_in_some_batches_only() -> None:
    """The first batch tells whether the others need the mode."""
    trainer: Any = SimpleNamespace(state=SimpleNamespace(stage="train"), lightning_module=nn.Linear(1, 1))
    step = RandomNumbers(0)._in_mode(trainer, lambda draws: torch.rand(3) if draws else None)
    sample_random.begin(lambda: torch.arange(3), torch.device("cpu"))
    sample_random.is_divided = True
    assert [step(False), step(False)] == [None, None]
    with pytest.raises(UserError, match="in some batches of an epoch only"):
        step(True)


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
