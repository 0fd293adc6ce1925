"""What the names of precisions say: those of `trainer.precision`, and Lightning's short ones, such as 64 and bf16."""

from typing import Any

_DTYPES = {"64": "float64", "32": "float32", "None": "float32", "16": "float16", "bf16": "bfloat16"}


def dtype_name(precision: Any) -> str | None:
    """Return the type in which matrices are multiplied, as torch names it; None for others than those of torch."""
    return _DTYPES.get(str(precision).partition("-")[0])


def is_double(precision: Any) -> bool:
    """Return whether all numbers are float64."""
    return str(precision) in ("64-true", "64")


def scales_loss(precision: Any) -> bool:
    """Return whether the loss is scaled, because its gradients would be too small for float16."""
    return str(precision) in ("16-mixed", "16")
