"""The global generators of torch, NumPy and Python: their seeds, and whether something has drawn from them."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from onecurve.errors import UserError

EVALUATION, SETUP, EPOCH_START, EPOCH_END, AFTER_STAGE, TEST = -1, -2, -3, -4, -5, -6  # in place of an epoch
FETCHING = -1  # after the place of a sample, whose key would otherwise be that of the step of the same number


def drawing_epoch(trainer: Any) -> int:
    """Return the epoch by which a batch draws; evaluations of the same weights draw the same numbers at any time."""
    if trainer.testing:
        return TEST
    return trainer.current_epoch if trainer.training else EVALUATION


def seed_generators(key: int, device_type: str = "cpu", with_python: bool = True) -> None:
    """Seed the global generators of torch, NumPy and Python, with those of this process's devices of a type."""
    seed_torch(key, device_type)
    if with_python:
        random.seed(key)
    # Of the low 32 bits alone, which torch's generator takes, it would give the numbers of torch.randint.
    np.random.seed((key ^ key >> 32) % 2**32)


def seed_torch(key: int, device_type: str = "cpu") -> None:
    """Seed the global generators of torch, with those of this process's devices of a type.

    torch.manual_seed would also seed, and so use, devices that the process does not use; and it would record a stack
    trace for each of their types, which takes half a millisecond.
    """
    torch.default_generator.manual_seed(key)
    if device_type == "cuda":
        for generator in torch.cuda.default_generators:  # one process may drive several devices
            generator.manual_seed(key)
    elif device_type == "mps":
        torch.mps.manual_seed(key)


@contextmanager
def refuse_draws(name: str, is_divided: bool, device_type: str = "cpu") -> Iterator[None]:
    """Raise a UserError if a function draws random numbers for a batch that is a part of the global batch."""
    before = generator_states(device_type) if is_divided else []
    yield
    if is_divided and generator_states(device_type) != before:
        raise UserError(
            f"{name} draws random numbers for the samples of one process, so the curve would depend on the number of "
            "processes: draw them in the dataset, for each sample, or set bit_exact=true"
        )


def generator_states(device_type: str = "cpu") -> list[Any]:
    numpy_state: Any = np.random.get_state()
    return [*torch_generator_states(device_type), random.getstate(), numpy_state[1].tolist(), numpy_state[2]]


def torch_generator_states(device_type: str = "cpu") -> list[bytes]:
    """Return the states of torch's global generators, of the CPU and of this process's device of a type."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device_type == "cuda" else [])]
    return [state.numpy().tobytes() for state in states]
