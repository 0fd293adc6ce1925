"""Checks of the numbers that a network is built with."""

from collections.abc import Iterable

from onecurve import UserError


def check_sizes(**sizes: int | Iterable[int]) -> None:
    """Raise a UserError if a size, or one of several, is not above zero: torch would build layers without weights."""
    for name, value in sizes.items():
        if min(value if isinstance(value, Iterable) else [value], default=1) < 1:
            raise UserError(f"model.{name}={value}: give numbers above zero")


def check_probabilities(**probabilities: float) -> None:
    """Raise a UserError if a probability is not between 0 and 1."""
    for name, value in probabilities.items():
        if not 0 <= value <= 1:
            raise UserError(f"model.{name}={value}: give a fraction between 0 and 1")
