"""The global generators: their seeds, and draws that are refused."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from onecurve.errors import UserError
from onecurve.random.seeding import (
    AFTER_STAGE,
    EPOCH_END,
    EPOCH_START,
    EVALUATION,
    SETUP,
    TEST,
    drawing_epoch,
    generator_states,
    refuse_draws,
    seed_generators,
    torch_generator_states,
)
from tests.support.draws import KEY, draws, expected_draws


@pytest.mark.parametrize("key", [0, 3, KEY])
def test_a_key_seeds_all_generators(key: int) -> None:
    seed_generators(key)
    assert draws() == expected_draws(key)


@pytest.mark.parametrize(("training", "expected"), [(True, 3), (False, EVALUATION)])
def test_evaluations_draw_the_same_numbers_at_any_time(training: bool, expected: int) -> None:
    assert drawing_epoch(SimpleNamespace(current_epoch=3, training=training, testing=False)) == expected


def test_numpy_draws_other_numbers_than_torch() -> None:
    """Both have the same generator, a Mersenne Twister."""
    seed_generators(KEY)
    assert int(torch.randint(2**20, ())) != np.random.randint(2**20)


@pytest.mark.parametrize(("device_type", "expected"), [("cpu", []), ("cuda", [5, 5]), ("mps", ["mps", 5]), ("xpu", [])])
def test_a_key_seeds_the_generators_of_the_devices(
    device_type: str, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[Any] = []
    monkeypatch.setattr(torch.cuda, "default_generators", [SimpleNamespace(manual_seed=seeds.append)] * 2)
    monkeypatch.setattr(torch.mps, "manual_seed", lambda key: seeds.extend(["mps", key]))
    seed_generators(5, device_type)
    assert seeds == expected


def test_draws_on_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    states = iter([torch.tensor([1]), torch.tensor([2]), torch.tensor([3])])
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: next(states))
    with refuse_draws("augment", is_divided=False, device_type="cuda"):
        next(states)
    with pytest.raises(UserError, match=r"^augment draws"), refuse_draws("augment", True, "cuda"):
        pass


def test_states_of_the_generators() -> None:
    """A first draw of NumPy changes its whole state, and a second one only its position."""
    for draw, change in [(torch.rand, 0), (random.gammavariate, 1), (np.random.rand, 3)]:
        np.random.rand()
        before = generator_states()
        assert generator_states() == before
        draw(1, 1)  # type: ignore[operator]
        assert [number for number in range(4) if generator_states()[number] != before[number]] == [change]
    np.random.seed(2)
    assert generator_states()[2] != before[2]
    assert torch_generator_states() == [torch.get_rng_state().numpy().tobytes()]


def test_states_of_the_generator_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([1, 2], dtype=torch.uint8))
    assert torch_generator_states("cuda") == [*torch_generator_states(), b"\x01\x02"]
    assert len(torch_generator_states("mps")) == 1


@pytest.mark.parametrize(
    "draw", [torch.rand, np.random.rand, lambda _: random.random()], ids=["torch", "numpy", "random"]
)
def test_a_part_of_a_batch_must_not_draw(draw: object) -> None:
    with pytest.raises(UserError, match="collate_fn draws random numbers"), refuse_draws("collate_fn", is_divided=True):
        draw(1)  # type: ignore[operator]
    with refuse_draws("collate_fn", is_divided=False):
        draw(1)  # type: ignore[operator]
    with refuse_draws("collate_fn", is_divided=True):
        pass


def test_no_epoch_draws_as_what_is_outside_of_them() -> None:
    assert len({EVALUATION, SETUP, EPOCH_START, EPOCH_END, AFTER_STAGE, TEST}) == 6
    assert max(EVALUATION, SETUP, EPOCH_START, EPOCH_END, AFTER_STAGE, TEST) < 0
