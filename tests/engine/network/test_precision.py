"""The names of precisions."""

from typing import Any

import pytest

from onecurve.network.precision import dtype_name


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("32-true", "float32"),
        (32, "float32"),
        (None, "float32"),
        ("64-true", "float64"),
        (64, "float64"),
        ("bf16-mixed", "bfloat16"),
        ("bf16", "bfloat16"),
        ("16-true", "float16"),
        ("transformer-engine", None),
        ("nf4", None),
    ],
)
def test_type_of_a_precision(precision: Any, expected: str | None) -> None:
    assert dtype_name(precision) == expected
