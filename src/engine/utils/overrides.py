"""Options by dotted name, and values as Hydra's command line has them."""

import json
from typing import Any


def flatten_config(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to {dotted name: value}."""
    if not isinstance(node, dict):
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, child in node.items():
        flat |= flatten_config(child, f"{prefix}.{key}".strip("."))
    return flat


def quote(value: Any) -> str:
    """Return the value as a quoted string in Hydra's override grammar."""
    escaped = str(value).replace("'", r"\'")
    return f"'{escaped}'"


def as_typed(value: Any) -> str:
    """Return the value for an error message: true, false and null as the user types them, others as Python does."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
