"""Nested configurations as flat dictionaries."""

from typing import Any


def flatten_config(node: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to {dotted name: value}."""
    if not isinstance(node, dict):
        return {prefix: node}
    flat: dict[str, Any] = {}
    for key, child in node.items():
        flat |= flatten_config(child, f"{prefix}.{key}".strip("."))
    return flat
